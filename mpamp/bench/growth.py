"""How cost grows: with parameters, regions, rules, and optimizers under one scaler; and with a program's age."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from ..devices.registry import set_op_rules
from ..engine.casts.cache import clear_cache
from ..errors import OpTableError, UnknownOpError
from ..regions.region import autocast
from ..rules.optable import OpTable
from ..scaler import GradScaler
from ..torch_internals import dispatch_get_all_op_names
from .fit import Fit, fit
from .timing import synchronizer

__all__ = ["SUBJECTS", "Growth", "Point", "memory_over_regions", "names_of_ops", "run"]

Work = Callable[[], object]
Make = Callable[[int, torch.device, torch.dtype], Work]


@dataclass(frozen=True)
class Point:
    """What n things cost.

    Attributes:
        n: How many there are.
        us: The median time of one use of all of them, in microseconds.
        bytes: The host's memory that they and their use hold, as Python's allocator counts it.
        device_bytes: The device's memory likewise; None where it doesn't tell.
    """

    n: int
    us: float
    bytes: int
    device_bytes: int | None


@dataclass(frozen=True)
class Growth:
    """How the cost of one kind of thing grows.

    Attributes:
        subject: The kind of thing.
        points: The costs, from the fewest to the most.
        time: How the time grows.
        memory: How the host's memory grows.
    """

    subject: str
    points: tuple[Point, ...]
    time: Fit
    memory: Fit


# -- What is made n times ----------------------------------------------------------------------------


def parameters(n: int, device: torch.device, dtype: torch.dtype) -> Work:
    """A training step on n small weights, whose casts are kept."""
    weights = [torch.nn.Parameter(torch.ones(4, 4, device=device)) for _ in range(n)]
    return _training(weights, [torch.optim.SGD(weights, lr=0.01, foreach=True)], device, dtype)


def optimizers(n: int, device: torch.device, dtype: torch.dtype) -> Work:
    """A training step with n optimizers under one scaler."""
    weights = [torch.nn.Parameter(torch.ones(4, 4, device=device)) for _ in range(n)]
    return _training(weights, [torch.optim.SGD([weight], lr=0.01) for weight in weights], device, dtype)


def _training(
    weights: list[torch.nn.Parameter], optims: list[torch.optim.SGD], device: torch.device, dtype: torch.dtype
) -> Work:
    x = torch.ones(4, 4, device=device)
    scaler = GradScaler(device.type, init_scale=2.0)

    def work() -> None:
        with autocast(device.type, dtype, persistent_cache=True):
            loss = torch.stack([linear(x, weight).sum() for weight in weights]).sum()
        scaler.scale(loss).backward()
        for optim in optims:
            scaler.step(optim)
        scaler.update()
        for optim in optims:
            optim.zero_grad()

    return work


def regions_in_turn(n: int, device: torch.device, dtype: torch.dtype) -> Work:
    """n regions, one after the other, every other one with a rule of its own."""
    return lambda: use_regions(n, device, dtype)


def regions_at_once(n: int, device: torch.device, dtype: torch.dtype) -> Work:
    """n regions, each open inside of the one before."""

    def work() -> None:
        with contextlib.ExitStack() as stack:
            for number in range(n):
                stack.enter_context(autocast(device.type, dtype, ops=_RULES[number % 2]))

    return work


def rules(n: int, device: torch.device, dtype: torch.dtype) -> Work:
    """n rules for the process, set and used by a region."""
    names = names_of_ops(n)
    x = torch.ones(4, 4, device=device)

    def work() -> None:
        set_op_rules(device.type, dict.fromkeys(names, "fp32"))
        with autocast(device.type, dtype):
            linear(x, x)

    return work


_SLACK = 1024
"""Bytes that come and go between two looks at the memory, however many regions are between them."""
_RULES: tuple[dict[str, str] | None, ...] = (None, {"gelu": "fp32"})


def use_regions(n: int, device: torch.device, dtype: torch.dtype) -> None:
    """Enter and leave n regions."""
    for number in range(n):
        with autocast(device.type, dtype, ops=_RULES[number % 2]):
            pass


def names_of_ops(n: int) -> list[str]:
    """Return n of torch's overloads that a rule can name, in alphabetical order.

    Raises:
        ValueError: This torch has fewer.
    """
    found: list[str] = []
    for name in sorted(dispatch_get_all_op_names()):
        if len(found) == n:
            return found
        if name.startswith("aten::"):
            with contextlib.suppress(OpTableError, UnknownOpError):
                found += [op for op in OpTable({name: "fp32"}) if op == name]
    if len(found) < n:
        raise ValueError(f"torch has {len(found)} ops that a rule can name, not {n}.")
    return found


@dataclass(frozen=True)
class Subject:
    """What is made n times, and how many times in full and in a test."""

    make: Make
    counts: tuple[int, ...]
    quick: tuple[int, ...] = (1, 4, 16)


SUBJECTS = {
    "parameters": Subject(parameters, (1, 10, 100, 1000, 3000, 10_000)),
    "regions in turn": Subject(regions_in_turn, (1, 10, 100, 300, 1000)),
    "regions at once": Subject(regions_at_once, (1, 10, 100, 300, 1000)),
    "rules": Subject(rules, (1, 10, 100, 300, 1000)),
    "optimizers under one scaler": Subject(optimizers, (1, 10, 80, 250, 800)),
}


# -- Costs -------------------------------------------------------------------------------------------


def run(subject: str, device: torch.device, dtype: torch.dtype, *, rounds: int, is_quick: bool) -> Growth:
    """Measure how the cost of one kind of thing grows."""
    what = SUBJECTS[subject]
    counts = what.quick if is_quick else what.counts
    try:
        points = tuple(_point(what, n, device, dtype, rounds) for n in counts)
    finally:
        set_op_rules(device.type, None)
        clear_cache()
    times, sizes = [p.us for p in points], [float(p.bytes) for p in points]
    return Growth(subject, points, fit(counts, times), fit(counts, sizes))


def _point(what: Subject, n: int, device: torch.device, dtype: torch.dtype, rounds: int) -> Point:
    def make_and_use() -> Work:
        work = what.make(n, device, dtype)
        work()
        return work

    us = _median_us(make_and_use(), device, rounds)
    set_op_rules(device.type, None)
    held, device_held = _held(make_and_use, device)
    return Point(n, us, held, device_held)


def _median_us(work: Work, device: torch.device, rounds: int) -> float:
    synchronize, times = synchronizer(device), []
    work()
    for _ in range(rounds):
        synchronize()
        begin = time.perf_counter()
        work()
        synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    return round(statistics.median(times), 2)


def _held(make: Callable[[], Work], device: torch.device) -> tuple[int, int | None]:
    """Return the bytes of host and device that what ``make`` returns, and its first use, hold."""
    clear_cache()
    gc.collect()
    allocated = getattr(torch.get_device_module(device), "memory_allocated", None)
    before = 0 if allocated is None else allocated()
    tracemalloc.start()
    try:
        kept = make()
        gc.collect()
        return tracemalloc.get_traced_memory()[0], None if allocated is None else allocated() - before
    finally:
        tracemalloc.stop()
        del kept


def memory_over_regions(device: torch.device, dtype: torch.dtype, *, few: int, many: int) -> dict[str, Any]:
    """Return the memory after a few regions and after many; what each one more leaves should be nothing.

    The resident set is what the system gave to the process, the compiled engine's memory included; it moves by pages.
    """
    use_regions(few, device, dtype)
    _resident_bytes()  # what asking takes the first time is no region's
    gc.collect()
    tracemalloc.start()
    try:
        seen = []
        for more in (few, many - few):
            use_regions(more, device, dtype)
            gc.collect()
            seen.append((tracemalloc.get_traced_memory()[0], _resident_bytes()))
    finally:
        tracemalloc.stop()
    (first, first_resident), (last, last_resident) = seen
    return {
        "regions": [few, many],
        "bytes": [first, last],
        "resident_bytes": [first_resident, last_resident],
        "bytes_per_region": round((last - first) / (many - few), 4),
        "is_equal": last - first < _SLACK,
    }


def _resident_bytes() -> int | None:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return None
    import resource

    return int(statm.read_text().split()[1]) * resource.getpagesize()
