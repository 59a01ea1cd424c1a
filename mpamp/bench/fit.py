"""How a cost grows with a number of things: its constant part, its part for each, and whether it is linear."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MOST", "Fit", "fit"]

MOST = 1.15
"""The exponent up to which growth is called linear: 2 is quadratic, and caches that fill add some hundredths."""


@dataclass(frozen=True)
class Fit:
    """A cost as a constant and a power of the number of things.

    Attributes:
        constant: The cost of the fewest.
        each: What one more adds, over the whole range.
        exponent: The power of n that the cost grows with over the last decade; 0 where it doesn't grow.
        is_linear: Whether that is at most ``MOST``.
    """

    constant: float
    each: float
    exponent: float
    is_linear: bool


def fit(counts: Sequence[int], costs: Sequence[float]) -> Fit:
    """Fit the costs of some counts, in ascending order.

    Raises:
        ValueError: There are fewer than two counts.

    Example:
        >>> fit([1, 10, 100], [5.0, 14.0, 104.0])
        Fit(constant=5.0, each=1.0, exponent=1.0, is_linear=True)
        >>> fit([1, 10, 100], [1.0, 100.0, 10_000.0]).is_linear
        False
    """
    if len(counts) < 2:
        raise ValueError(f"growth is seen between two counts at least; there are {len(counts)}.")
    each = (costs[-1] - costs[0]) / (counts[-1] - counts[0])
    exponent = _exponent(counts, costs)
    return Fit(round(costs[0], 4), round(each, 4), round(exponent, 3), exponent <= MOST)


def _exponent(counts: Sequence[int], costs: Sequence[float]) -> float:
    """Return the slope of log(cost) over log(n), by least squares, where n is within ten times of the most.

    What the fewest cost is taken off: it is what there is without any growth.
    """
    points = [
        (math.log(n - counts[0]), math.log(cost - costs[0]))
        for n, cost in zip(counts[1:], costs[1:], strict=True)
        if cost > costs[0] and 10 * n >= counts[-1]
    ]
    if len(points) < 2:
        return 0.0 if not points or len(counts) > 2 else 1.0
    mean_x, mean_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return float(max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in points) / spread))
