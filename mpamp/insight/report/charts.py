"""The pictures of the page: bars and a line, as numbers from 0 to 100 that the template makes shapes of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..overflow_report import plain
from ..records import OpUse, short_name
from ..text import size
from .scaling import ScaleLog, Skip

__all__ = ["Bar", "Line", "Mark", "bars", "by_module", "by_op", "scale_line", "shares"]

_MOST_MARKS = 250
_MOST_BARS = 12


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: what it is of, how long it is in percent of the longest, what it says, and how it is painted."""

    name: str
    percent: float
    value: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """A skipped step, in percent from the left and from the top."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Line:
    """A scale over attempts, as a path in a box of 100 x 100; ticks are (percent, text)."""

    path: str
    marks: tuple[Mark, ...]
    y_ticks: tuple[tuple[float, str], ...]
    x_ticks: tuple[tuple[float, str], ...]


def bars(
    uses: Iterable[OpUse], key: Callable[[OpUse], str], value: Callable[[OpUse], float], shown: Callable[[float], str]
) -> list[Bar]:
    """Return bars of sums of a value by a key, the longest first, without those of 0; past a dozen, the rest as one."""
    sums: dict[str, float] = {}
    for use in uses:
        if use.phase != "compiled":
            sums[key(use)] = sums.get(key(use), 0) + value(use)
    ordered = sorted(((name, number) for name, number in sums.items() if number), key=lambda pair: -pair[1])
    top, rest = ordered[:_MOST_BARS], ordered[_MOST_BARS:]
    others = sum(number for _, number in rest)
    most = max([others, *(number for _, number in top)], default=1) or 1
    found = [Bar(name, 100 * number / most, shown(number)) for name, number in top]
    return [*found, Bar(f"{len(rest)} others", 100 * others / most, shown(others), "rest")] if rest else found


def by_op(uses: Iterable[OpUse]) -> list[Bar]:
    """Return the bytes that casts moved, by op."""
    return bars(uses, lambda use: short_name(use.op), lambda use: use.cast_bytes, size)


def by_module(uses: Iterable[OpUse]) -> list[Bar]:
    """Return the bytes that casts moved, by module, as deep in the model as a dozen bars go.

    Example:
        >>> by_module([])
        []
    """
    uses = list(uses)
    names = [use.module.split(".") for use in uses if use.cast_bytes]
    depth = 1
    while depth < max(map(len, names), default=1) and len({tuple(n[: depth + 1]) for n in names}) <= _MOST_BARS:
        depth += 1

    def part(use: OpUse) -> str:
        return ".".join(use.module.split(".")[:depth]) or "(outside)"

    return bars(uses, part, lambda use: use.cast_bytes, size)


def shares(uses: Iterable[OpUse], value: Callable[[OpUse], float]) -> list[tuple[str, float]]:
    """Return in which dtypes ops ran, by their first result, as shares of a sum in percent; the largest first."""
    sums: dict[str, float] = {}
    for use in uses:
        if use.phase != "compiled" and use.dtypes_out:
            sums[use.dtypes_out[0]] = sums.get(use.dtypes_out[0], 0) + value(use)
    total = sum(sums.values())
    ordered = sorted(sums.items(), key=lambda pair: -pair[1])
    return [(name, 100 * number / total) for name, number in ordered if number]


def scale_line(log: ScaleLog) -> Line:
    """Return the picture of a scaler's history: the scale in powers of two, and the skips on it."""
    scales = [math.log2(scale) for _, scale in log.points if scale > 0 and math.isfinite(scale)] or [0.0]
    low, high = math.floor(min(scales)) - 0.5, math.ceil(max(scales)) + 0.5

    def x(attempt: float) -> float:
        return 100 * (attempt - 1) / max(1, log.attempts - 1)

    def y(scale: float) -> float:
        exponent = math.log2(scale) if scale > 0 and math.isfinite(scale) else low
        return 100 * (high - exponent) / (high - low)

    path = []
    for number, (attempt, scale) in enumerate(log.points):
        path.append(f"{'H' if number else 'M'}{x(attempt):.2f}{'V' if number else ' '}{y(scale):.2f}")
    marks = tuple(Mark(x(s.attempt), y(s.scale), _said(s)) for s in log.skips[:_MOST_MARKS])
    return Line("".join(path) + "H100", marks, _powers(low, high, y), _numbers(log.attempts, x))


def _said(skip: Skip) -> str:
    where = "" if skip.overflow is None else f": {skip.overflow.op} in {skip.overflow.module or 'the script'}"
    return f"attempt {skip.attempt} skipped at {plain(skip.scale)}{where}"


def _powers(low: float, high: float, y: Callable[[float], float]) -> tuple[tuple[float, str], ...]:
    first, last = math.ceil(low), math.floor(high)
    step = max(1, math.ceil((last - first + 1) / 6))
    return tuple((y(2.0**e), plain(2.0**e) if -7 < e < 18 else f"2^{e}") for e in range(first, last + 1, step))


def _numbers(attempts: int, x: Callable[[float], float]) -> tuple[tuple[float, str], ...]:
    step = max(1, math.ceil((attempts - 1) / 4))  # as far from each other as they look
    return tuple((x(n), str(n)) for n in range(1, attempts + 1, step))
