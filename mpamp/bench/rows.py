"""What a run gives: one row for each workload, mode and precision; and the ratios between rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from .counts import Counts
from .timing import Timing

__all__ = ["NOISE", "Row", "with_ratios"]

NOISE = 0.03
"""Two medians of one run that differ by less than this share are called level."""


@dataclass(frozen=True)
class Row:
    """One workload in one precision.

    Attributes:
        suite: ``micro``, ``infer`` or ``train``.
        work: The workload.
        variant: The precision.
        mode: ``eager``, ``compile`` or ``freezing``.
        status: ``ok``; ``skipped`` where this machine can't, or time was over; ``failed`` where it raised.
        reason: Why there is no time.
        base: The variant that the ratio is to.
        time: The time of one step.
        ratio: The median time over the base's; below 1 is faster.
        peak_bytes: The most memory of the device that a step needed, with its own model and optimizer, without others'.
        counts: What a step ran.
    """

    suite: str
    work: str
    variant: str
    mode: str = "eager"
    status: Literal["ok", "skipped", "failed"] = "ok"
    reason: str | None = None
    base: str | None = None
    time: Timing | None = None
    ratio: float | None = None
    peak_bytes: int | None = None
    counts: Counts | None = None

    @property
    def verdict(self) -> str | None:
        """Say of a row of mpamp's whether it is ``faster``, ``level`` or ``slower`` than the base."""
        if self.ratio is None or not self.variant.startswith("mpamp"):
            return None
        return "slower" if self.ratio > 1 + NOISE else "faster" if self.ratio < 1 - NOISE else "level"


def with_ratios(rows: Iterable[Row], base: str) -> list[Row]:
    """Return rows that were measured in turns, with their ratios to one of them.

    Example:
        >>> times = [Timing(us, us, us, us, rounds=1, repeats=1) for us in (20.0, 15.0)]
        >>> rows = [Row("micro", "x", name, time=t) for name, t in zip(("torch", "mpamp"), times)]
        >>> [(row.ratio, row.verdict) for row in with_ratios(rows, "torch")]
        [(1.0, None), (0.75, 'faster')]
    """
    rows = list(rows)
    theirs = next((row.time for row in rows if row.variant == base and row.time is not None), None)
    if theirs is None:
        return rows
    return [r if r.time is None else replace(r, base=base, ratio=round(r.time.us / theirs.us, 4)) for r in rows]
