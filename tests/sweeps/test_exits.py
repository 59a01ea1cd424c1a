"""Whatever order regions are left in, and wherever an exception strikes, torch's autocast state comes back.

Checked after the last exit: all of torch's state, and that a plain ``torch.autocast`` has torch's own table, while the
process has rules under which ops of a region of ours would differ.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import mpamp

from .region_names import call_on_thread
from .region_runs import autocast_state, plain_dtypes

BF16, HALF, FP32 = torch.bfloat16, torch.float16, torch.float32
RULES = {"linear": "fp32", "tensordot": "fp32", "softmax": "fp32"}

KINDS: dict[str, Callable[[], Any]] = {
    "bf16": lambda: mpamp.autocast("cpu", BF16),
    "fp16": lambda: mpamp.autocast("cpu", HALF),
    "fp32": lambda: mpamp.autocast("cpu", FP32),
    "disabled": lambda: mpamp.autocast("cpu", enabled=False),
    "rules": lambda: mpamp.autocast("cpu", BF16, ops={"gelu": "fp32"}),
    "other rules": lambda: mpamp.autocast("cpu", HALF, ops={"silu": "fp32"}, cache_enabled=False),
    "xpu": lambda: mpamp.autocast("xpu", HALF, ops={"gelu": "fp32"}),
    "xpu disabled": lambda: mpamp.autocast("xpu", enabled=False),
    "kept": lambda: mpamp.autocast("cpu", BF16, persistent_cache=True),
}
"""XPU regions do nothing on a machine without one, but under fake tensors."""
FEW = ("bf16", "fp16", "disabled", "rules", "xpu", "fp32")

Order = tuple[int, ...]
"""Region numbers: the first time one stands there it is entered, the second time it is left."""
Case = tuple[tuple[str, ...], Order]


def orders(count: int) -> Iterator[Order]:
    """Yield every order of entering and leaving, regions numbered as they are entered."""

    def grow(order: Order, entered: int, is_open: frozenset[int]) -> Iterator[Order]:
        if entered < count:
            yield from grow((*order, entered), entered + 1, is_open | {entered})
        for number in sorted(is_open):
            yield from grow((*order, number), entered, is_open - {number})
        if entered == count and not is_open:
            yield order

    yield from grow((), 0, frozenset())


def cases(kinds: Iterable[str], count: int) -> Iterator[Case]:
    for order in orders(count):
        for chosen in itertools.product(kinds, repeat=count):
            yield chosen, order


@pytest.fixture(autouse=True)
def rules() -> Iterator[None]:
    mpamp.set_op_rules("cpu", RULES)
    yield
    mpamp.set_op_rules("cpu", None)


# -- Ways to enter and leave ---------------------------------------------------------------------------


def by_hand(case: Case) -> None:
    kinds, order = case
    regions = [KINDS[kind]() for kind in kinds]
    entered = set()
    for number in order:
        if number in entered:
            regions[number].__exit__(None, None, None)
        else:
            entered.add(number)
            regions[number].__enter__()


def by_generators(case: Case) -> None:
    def generator(kind: str) -> Iterator[None]:
        with KINDS[kind]():
            yield

    kinds, order = case
    running: dict[int, Any] = {}
    for number in order:
        if number in running:
            del running[number]  # abandoned: Python closes it
        else:
            running[number] = generator(kinds[number])
            next(running[number])


def by_tasks(case: Case) -> None:
    kinds, order = case

    async def main() -> None:
        turns = [asyncio.Event() for _ in order]
        done = [asyncio.Event() for _ in order]

        async def task(number: int) -> None:
            enter, leave = (i for i, n in enumerate(order) if n == number)
            await turns[enter].wait()
            with KINDS[kinds[number]]():
                done[enter].set()
                await turns[leave].wait()
            done[leave].set()

        tasks = [asyncio.ensure_future(task(n)) for n in range(len(kinds))]
        for turn, end in zip(turns, done, strict=True):
            turn.set()
            await end.wait()
        await asyncio.gather(*tasks)

    asyncio.run(main())


WAYS = {"by hand": by_hand, "generators": by_generators, "tasks": by_tasks}


# -- Misordered ----------------------------------------------------------------------------------------


def left_behind(cases: Iterable[Case], way: Callable[[Case], None], is_fake: bool = False) -> tuple[int, list[str]]:
    """Return how many cases ran, and those that left state; each of these gets the rest a fresh thread."""
    found: list[str] = []
    count = 0
    rest = iter(cases)

    def work() -> bool:
        nonlocal count
        with FakeTensorMode() if is_fake else nullcontext():
            for case in rest:
                count += 1
                before = autocast_state()
                problem = ""
                try:
                    way(case)
                except Exception as error:
                    problem = f"{type(error).__name__}: {str(error)[:100]}"
                after = autocast_state()
                left = [f"{k}: {before[k]} -> {after[k]}" for k in before if before[k] != after[k]]
                plain = plain_dtypes()
                if problem or left or plain != PLAIN:
                    changed = [] if plain == PLAIN else [f"torch.autocast gives {plain}"]
                    found.append(f"{case}: {'; '.join([problem, *left, *changed])}")
                    return True
        return False

    while call_on_thread(work, 600):
        if len(found) >= 200:
            break
    return count, found


PLAIN = [BF16, BF16, BF16, FP32, BF16, BF16, FP32, BF16]
pytestmark = pytest.mark.filterwarnings("ignore:device 'xpu' is not available")


def check(cases: Iterable[Case], way: Callable[[Case], None], is_fake: bool = False) -> int:
    count, found = left_behind(cases, way, is_fake)
    assert not found, f"{len(found)} of {count} leave state:\n" + "\n".join(found[:10])
    return count


def test_there_are_as_many_orders_as_there_are_matchings() -> None:
    assert [len(list(orders(n))) for n in (1, 2, 3, 4)] == [1, 3, 15, 105]


def test_torchs_own_state_comes_back_before_any_region() -> None:
    assert call_on_thread(plain_dtypes) == PLAIN


@pytest.mark.parametrize("way", WAYS)
def test_two_regions_in_every_order(way: str) -> None:
    assert check(cases(KINDS, 2), WAYS[way]) == 3 * len(KINDS) ** 2


def test_three_regions_in_every_order() -> None:
    assert check(cases(FEW, 3), by_hand) == 15 * len(FEW) ** 3


def test_three_tasks_in_every_order() -> None:
    assert check(cases(("bf16", "disabled", "rules"), 3), by_tasks) == 15 * 27


def test_two_devices_in_every_order() -> None:
    assert check(cases(("bf16", "rules", "xpu", "xpu disabled"), 2), by_hand, is_fake=True) == 3 * 16


@pytest.mark.sweep
def test_three_regions_of_every_kind_in_every_order() -> None:
    assert check(cases(KINDS, 3), by_hand) == 15 * len(KINDS) ** 3


@pytest.mark.sweep
@pytest.mark.parametrize("first", FEW)
def test_four_regions_in_every_order(first: str) -> None:
    chosen = (case for case in cases(FEW, 4) if case[0][0] == first)
    assert check(chosen, by_hand) == 105 * len(FEW) ** 3


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["generators", "tasks"])
def test_three_regions_in_other_ways_in_every_order(way: str) -> None:
    assert check(cases(FEW, 3), WAYS[way]) == 15 * len(FEW) ** 3


@pytest.mark.sweep
def test_three_regions_of_two_devices_in_every_order() -> None:
    kinds = ("bf16", "disabled", "rules", "xpu", "xpu disabled")
    assert check(cases(kinds, 3), by_hand, is_fake=True) == 15 * len(kinds) ** 3


# -- Never left ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_thread_that_ends_in_a_region_leaves_nothing(kind: str) -> None:
    before = autocast_state()
    for _ in range(3):
        call_on_thread(lambda: KINDS[kind]().__enter__())
    assert autocast_state() == before
    assert plain_dtypes() == PLAIN
    assert call_on_thread(lambda: (autocast_state(), plain_dtypes())) == (before, PLAIN)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_closed_on_another_thread_leaves_that_one_alone(kind: str) -> None:
    def generator() -> Iterator[None]:
        with KINDS[kind]():
            yield

    running = [generator()]
    kept = threading.Event()

    def enter() -> None:
        next(running[0])
        kept.wait(30)

    thread = threading.Thread(target=enter)
    before = autocast_state()
    thread.start()
    while not running[0].gi_suspended:
        pass
    running.clear()
    gc.collect()
    assert autocast_state() == before
    assert plain_dtypes() == PLAIN
    kept.set()
    thread.join()


# -- The check itself ----------------------------------------------------------------------------------


def test_state_left_is_found() -> None:
    """torch's own regions don't bear another order."""

    def way(case: Case) -> None:
        outer, inner = torch.autocast("cpu", BF16), torch.autocast("cpu", HALF)
        outer.__enter__()
        inner.__enter__()
        outer.__exit__(None, None, None)
        inner.__exit__(None, None, None)

    count, found = left_behind([(("bf16",), (0, 0))] * 2, way)
    assert (count, len(found)) == (2, 2)
    assert "cpu: (False, torch.bfloat16) -> (True, torch.bfloat16)" in found[0]


def test_a_table_left_is_found() -> None:
    def way(case: Case) -> None:
        mpamp.autocast("cpu", BF16).__enter__()
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_cache_enabled(True)

    _, found = left_behind([(("bf16",), (0, 0))], way)
    assert "torch.autocast gives [torch.float32" in found[0]
    assert F.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype is FP32
