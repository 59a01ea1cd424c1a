"""Interleaved timing: two variants are only compared where they were measured in turns, in one process.

On a shared or warming machine everything else differs by more than the variants do.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Context", "Timing", "Variant", "is_card", "joined", "measure", "nothing", "repeat", "synchronizer"]

Context = Callable[[], AbstractContextManager[Any]]


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Variant:
    """One way to do the work that is timed.

    Attributes:
        name: What it is called in tables.
        batch: Does the work as many times as it is told.
        context: What each turn runs in, such as an open region; entering it is not timed.
        setup: Called before each turn, not timed.
    """

    name: str
    batch: Callable[[int], None]
    context: Context = nullcontext
    setup: Callable[[], None] = nothing


@dataclass(frozen=True)
class Timing:
    """The time of one execution: the median over all turns, and their quartiles.

    Attributes:
        us: From start to finish, the device's work included, in microseconds.
        low_us: The lower quartile of the same.
        high_us: The upper quartile of the same.
        host_us: Until the host had issued everything; on the CPU the same as ``us``.
        rounds: The turns.
        repeats: The executions in each turn.
    """

    us: float
    low_us: float
    high_us: float
    host_us: float
    rounds: int
    repeats: int


def repeat(step: Callable[[], object]) -> Callable[[int], None]:
    """Return a batch that calls ``step`` again and again."""

    def batch(n: int) -> None:
        for _ in range(n):
            step()

    return batch


def joined(*contexts: Context) -> Context:
    """Return a context that enters all of ``contexts``, in this order."""

    @contextlib.contextmanager
    def enter() -> Any:
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            yield

    return enter


def is_card(device: torch.device) -> bool:
    """Tell whether a device is the accelerator of this machine, whose work is queued and whose memory is its own."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def synchronizer(device: torch.device) -> Callable[[], None]:
    """Return what waits for the device's queued work; the CPU has none."""
    return torch.accelerator.synchronize if is_card(device) else nothing


def measure(
    variants: Sequence[Variant],
    device: torch.device,
    *,
    rounds: int = 30,
    turn_s: float = 0.01,
    warm_up: int = 3,
    budget_s: float = math.inf,
    agree: Callable[[int], int] = int,
) -> list[Timing]:
    """Time variants in turns, each round in another order.

    Args:
        variants: What to time.
        device: Where the work runs.
        rounds: The turns of each variant.
        turn_s: How long a turn of the slowest variant should take at least; sets the repeats.
        warm_up: The untimed executions at the start of each turn, for a variant may leave caches cold to the next.
        budget_s: Start no further round after so many seconds; the first one always runs.
        agree: Takes a number that depends on this process's clock, and returns the one that all processes go by.

    Returns:
        One timing per variant, in their order.

    Example:
        >>> a, b = (Variant(name, repeat(lambda: torch.ones(2) + 1)) for name in "ab")
        >>> [timing.rounds for timing in measure([a, b], torch.device("cpu"), rounds=2, turn_s=0.0001)]
        [2, 2]
    """
    start = time.perf_counter()
    synchronize = synchronizer(device)

    def turn(variant: Variant, repeats: int) -> tuple[float, float]:
        variant.setup()
        with variant.context():
            variant.batch(warm_up)
            synchronize()
            begin = time.perf_counter()
            variant.batch(repeats)
            issued = time.perf_counter()
            synchronize()
            end = time.perf_counter()
        return (end - begin) / repeats * 1e6, (issued - begin) / repeats * 1e6

    for variant in variants:
        turn(variant, 1)
    slowest = max(turn(variant, 2)[0] for variant in variants)
    repeats = agree(max(1, math.ceil(turn_s * 1e6 / slowest)))
    found: list[list[tuple[float, float]]] = [[] for _ in variants]
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            if number and agree(time.perf_counter() - start > budget_s):
                break
            for place in range(len(variants)):
                index = (place + number) % len(variants)
                found[index].append(turn(variants[index], repeats))
    finally:
        gc.enable()
    return [_timing(turns, repeats) for turns in found]


def _timing(turns: list[tuple[float, float]], repeats: int) -> Timing:
    total = [us for us, _ in turns]
    low, middle, high = statistics.quantiles(total, n=4, method="inclusive") if len(total) > 1 else total * 3
    host = statistics.median(us for _, us in turns)
    return Timing(round(middle, 4), round(low, 4), round(high, 4), round(host, 4), len(turns), repeats)
