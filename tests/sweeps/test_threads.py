"""Eight threads in regions while a ninth changes the rules and a tenth the weights: nothing wrong, nothing kept.

What another thread changes is numbered: a result is right if it belongs to a number between the last change that had
ended before and the last one that had begun after.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import mpamp

from .region_runs import autocast_state, plain_dtypes
from .test_exits import BF16, FP32, HALF, PLAIN


class Changes:
    """What one thread changes over and over: which change has begun, which has ended."""

    def __init__(self, change: Callable[[int], Any]) -> None:
        self.change = change
        self.begun = self.ended = 0

    def next(self) -> None:
        number = self.begun + 1
        self.begun = number
        self.change(number)
        self.ended = number


class World:
    """What the threads share."""

    def __init__(self) -> None:
        self.rules = Changes(lambda n: mpamp.set_op_rules("cpu", {"linear": "fp32"} if n % 2 else {"gelu": "fp32"}))
        self.weight = torch.nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.trained = torch.nn.Parameter(torch.zeros(4, 4))
        self.writes = Changes(self._write)
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()

    def _write(self, number: int) -> None:
        with torch.no_grad():
            self.weight.fill_(number % 64)
            self.trained.fill_(number % 64)

    def expect(self, what: str, is_right: bool, seen: Any) -> None:
        self.counts[what] += 1
        if not is_right:
            self.wrong.append(f"{what}: {seen}")


ONES = torch.ones(4, 4)


def default_region(world: World) -> None:
    """The table is one that held while the region was entered, the whole region long."""
    ended = world.rules.ended
    with mpamp.autocast("cpu", BF16):
        begun = world.rules.begun
        seen = {F.linear(ONES, ONES).dtype for _ in range(5)}
    possible = {FP32 if n % 2 else BF16 for n in range(ended, begun + 1)}
    world.expect("default region", len(seen) == 1 and seen <= possible, (seen, ended, begun))


def table_of_its_own(world: World) -> None:
    with mpamp.autocast("cpu", HALF, ops={"linear": "lower_precision_fp", "softmax": "fp32"}):
        seen = F.linear(ONES, ONES).dtype, ONES.half().softmax(0).dtype
        with mpamp.autocast("cpu", BF16, ops={"linear": "fp32"}):
            seen += (F.linear(ONES, ONES).dtype,)
        seen += (F.linear(ONES, ONES).dtype,)
    world.expect("table of its own", seen == (HALF, FP32, FP32, HALF), seen)


def torchs_own(world: World) -> None:
    seen = plain_dtypes()
    world.expect("torch.autocast", seen == PLAIN, seen)


def recomputed(world: World) -> None:
    seen, weight = [], torch.nn.Parameter(torch.ones(4, 4))  # its own, for torch checks that no one writes into it

    def block(x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, weight)
        seen.append(y.dtype)
        return F.gelu(y).float()  # saves what makes the recompute run to here

    ended = world.rules.ended
    x = torch.ones(4, 4, requires_grad=True)
    with mpamp.autocast("cpu", BF16):
        begun = world.rules.begun
        loss = checkpoint(block, x, use_reentrant=bool(begun % 4 < 2)).sum()
    grad = torch.autograd.backward if begun % 3 else lambda loss: loss.backward()
    grad(loss)
    possible = {FP32 if n % 2 else BF16 for n in range(ended, begun + 1)}
    world.expect("recompute", len(seen) == 2 and len(set(seen)) == 1 and set(seen) <= possible, (seen, ended, begun))


def _fresh_weight(world: World, name: str, weight: torch.Tensor, persistent: bool) -> None:
    with (
        torch.no_grad(),
        mpamp.autocast("cpu", BF16, ops={"linear": "lower_precision_fp"}, persistent_cache=persistent),
    ):
        for _ in range(3):
            ended = world.writes.ended
            out = F.linear(ONES, weight) / 4
            numbers = [n % 64 for n in range(ended, world.writes.begun + 1)]
            world.expect(name, bool((out >= min(numbers)).all() and (out <= max(numbers)).all()), (out, numbers))


def frozen_weight(world: World) -> None:
    _fresh_weight(world, "frozen weight", world.weight, False)


def persistent_weight(world: World) -> None:
    _fresh_weight(world, "persistent weight", world.weight, True)


def trained_weight(world: World) -> None:
    _fresh_weight(world, "trained weight", world.trained, True)


WORK = (
    default_region,
    table_of_its_own,
    torchs_own,
    recomputed,
    frozen_weight,
    persistent_weight,
    trained_weight,
    default_region,
)


def run_threads(rounds: int) -> World:
    """Run each kind of work ``rounds`` times on a thread of its own, beside the two that change things."""
    world, is_over = World(), threading.Event()
    failed: list[str] = []

    def guarded(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            before = autocast_state()
            try:
                work()
            except BaseException as error:
                failed.append(repr(error)[:300])
            if autocast_state() != before:
                failed.append(f"{work} left {autocast_state()}")

        return run

    def keep_changing(changes: Changes) -> Callable[[], None]:
        def work() -> None:
            while not is_over.is_set():
                changes.next()
                time.sleep(0.0005)

        return work

    def repeat(work: Callable[[World], None]) -> Callable[[], None]:
        return lambda: [work(world) for _ in range(rounds)] and None

    changing = [threading.Thread(target=guarded(keep_changing(c))) for c in (world.rules, world.writes)]
    working = [threading.Thread(target=guarded(repeat(work))) for work in WORK]
    for thread in (*changing, *working):
        thread.start()
    for thread in working:
        thread.join(600)
    is_over.set()
    for thread in changing:
        thread.join(60)
    assert not any(t.is_alive() for t in (*changing, *working))
    for work in (frozen_weight, persistent_weight, trained_weight, default_region):  # nothing stays stale for good
        work(world)
    assert failed == []
    return world


@pytest.fixture(autouse=True)
def often_switched() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)
    mpamp.set_op_rules("cpu", None)
    mpamp.clear_cache()


def objects_of_mpamp() -> Counter[str]:
    gc.collect()
    return Counter(type(o).__qualname__ for o in gc.get_objects() if str(type(o).__module__).startswith("mpamp"))


def check(rounds: int) -> None:
    world = run_threads(rounds)
    assert world.wrong == []
    assert sum(world.counts.values()) >= rounds * (len(WORK) + 6)
    assert world.rules.ended > 1
    assert world.writes.ended > 1


def test_eight_threads_while_rules_and_weights_change() -> None:
    check(40)


@pytest.mark.sweep
def test_eight_threads_for_long_while_rules_and_weights_change() -> None:
    check(300)
    before = objects_of_mpamp()
    check(3000)
    more = objects_of_mpamp() - before
    assert sum(more.values()) < 50, more


def test_a_stale_table_is_found() -> None:
    world = World()
    world.rules.next()
    world.rules.change = lambda n: None
    world.rules.next()
    default_region(world)
    assert world.wrong == ["default region: ({torch.float32}, 2, 2)"]


def test_a_stale_weight_is_found() -> None:
    world = World()
    world.writes.next()
    persistent_weight(world)
    assert world.wrong == []
    size = world.weight.nbytes
    world.writes.change = lambda n: ctypes.memmove(
        world.weight.data_ptr(), torch.full_like(world.weight, n).data_ptr(), size
    )
    world.writes.next()
    persistent_weight(world)
    assert len(world.wrong) == 3
