"""Loss scales that keep a step's gradients, found by running its backward pass with them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from .overflow_report import Overflow, StepReport, plain

__all__ = ["Backward", "with_scales"]

_LEAST, _MOST = -60, 120
"""Exponents of two between which a scale is looked for: what is beyond is float32's range, not a lower dtype's."""
_MARGIN = 0.9
"""Of the share that is looked for: what is kept is not to be named again for the last digit of a norm."""


_SAME = 0.01
"""Share of a gradient's norm up to which two are the same."""


class Backward(NamedTuple):
    """A backward pass that can be run again, and what its gradients would be without underflow.

    Attributes:
        run: Runs it with a loss scale and returns the gradients as they come: scaled.
        whole: By a parameter's name: the gradient that nothing is lost of, at ``scale``.
        scale: The scale that ``whole`` has.
    """

    run: Callable[[float], dict[str, Tensor]]
    whole: dict[str, Tensor]
    scale: float


class _Tried(NamedTuple):
    fits: bool
    lost: frozenset[str]
    """Parameters whose gradients still lack more than was asked for."""


def with_scales(report: StepReport, backward: Backward, least_share: float) -> StepReport:
    """Return a step's report with the loss scales that mend it, each of which was run.

    Gradients that are all rounding aren't in it any more: with scales that lose nothing they still aren't what they
    were to be.
    """
    overflow = report.overflow
    if overflow is not None and overflow.phase == "forward":
        return report
    trials = _Trials(backward, least_share * _MARGIN)
    largest = trials.largest()
    if largest is None:
        return report
    rounding = trials.rounding(largest)
    named = [lost for lost in report.underflows if lost.parameter not in rounding]
    keepable = {lost.parameter for lost in named} - trials.at(largest).lost
    keeping = 2.0 ** trials.least_keeping(keepable, largest) if keepable else None
    underflows = tuple(
        dataclasses.replace(
            lost, scale_to_keep=keeping if lost.parameter in keepable else None, largest_scale=2.0**largest
        )
        for lost in named
    )
    if overflow is not None:
        overflow = _fitted(overflow, 2.0**largest)
    return dataclasses.replace(report, overflow=overflow, underflows=underflows)


def _fitted(overflow: Overflow, scale: float) -> Overflow:
    advice = f"{overflow.advice}, or a loss scale of at most {plain(scale)}"
    return dataclasses.replace(overflow, fitting_scale=scale, advice=advice)


class _Trials:
    """Runs of a backward pass with powers of two as loss scales."""

    def __init__(self, backward: Backward, least_share: float) -> None:
        self._backward, self._least_share = backward, least_share
        self._first = min(_MOST, max(_LEAST, math.floor(math.log2(backward.scale))))
        self._tried: dict[int, _Tried] = {}

    def at(self, exponent: int) -> _Tried:
        """Run the backward pass with a scale, unless that was done."""
        if exponent not in self._tried:
            self._tried[exponent] = self._run(2.0**exponent)
        return self._tried[exponent]

    def _run(self, scale: float) -> _Tried:
        gradients = self._backward.run(scale)
        if not all(bool(grad.isfinite().all()) for grad in gradients.values()):
            return _Tried(False, frozenset(gradients))
        whole, factor = self._backward.whole, self._backward.scale / scale
        found = {name: _off(grad, whole[name], factor) for name, grad in gradients.items() if name in whole}
        return _Tried(True, frozenset(name for name, off in found.items() if off > self._least_share))

    def rounding(self, largest: int) -> set[str]:
        """Return the parameters whose gradients are the same with half the largest scale, and yet not as they should.

        Powers of two change nothing of a gradient but what underflows.
        """
        lost = self.at(largest).lost
        if not lost:
            return set()
        one, half = self._backward.run(2.0**largest), self._backward.run(2.0 ** (largest - 1))
        return {name for name in lost if bool(one[name].any()) and _off(half[name], one[name], 2.0) < _SAME}

    def largest(self) -> int | None:
        """Return the exponent of the largest scale that fits; None if none does."""
        low = high = self._first
        step = 1
        while self.at(low).fits is False:
            if low == _LEAST:
                return None
            high, low, step = low, max(_LEAST, low - step), 2 * step
        step = 1
        while high == low or self.at(high).fits:
            if high == _MOST:
                return high
            low, high, step = high, min(_MOST, high + step), 2 * step
        return _first_that(lambda exponent: not self.at(exponent).fits, low, high) - 1

    def least_keeping(self, names: set[str], largest: int) -> int:
        """Return the exponent of the least scale that keeps some gradients that the largest keeps."""
        low = min(self._first, largest - 1)
        return _first_that(lambda exponent: not names & self.at(exponent).lost, low, largest)


def _off(grad: Tensor, whole: Tensor, factor: float) -> float:
    """Return how far a gradient, times a factor, is off another, as a share of that one's norm."""
    most = float(whole.abs().amax()) if whole.numel() else 0.0
    if not 0 < most < math.inf:
        return 0.0
    wanted = whole.float() / most  # its squares are float32's
    return float((wanted - grad.float() * (factor / most)).norm() / wanted.norm())


def _first_that(is_so: Callable[[int], bool], low: int, high: int) -> int:
    """Return the least number for which something is so, where it isn't for ``low`` and is for ``high``."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_so(middle) else (middle, high)
    return high
