"""The rule by which the loss scale grows and backs off, as a pure value."""

from __future__ import annotations

import ctypes
import math
import numbers
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ScalerSettingError

__all__ = ["MAX_SCALE", "MIN_SCALE", "ScaleState"]

MIN_SCALE = 2.0**-16
"""The least scale, unless asked otherwise: as far below 1 as torch's initial scale is above."""
MAX_SCALE = 2.0**126
"""The greatest scale, unless asked otherwise: the last power of two whose reciprocal is a normal float32."""
INT32_MAX = 2**31 - 1


def float32(value: float) -> float:
    """Round to float32, in which devices keep the scale; too great a value becomes inf."""
    return ctypes.c_float(value).value


def check_number(name: str, value: Any, *, least: float = 0.0, most: float = math.inf) -> float:
    """Return a setting as a float.

    Raises:
        ScalerSettingError: It isn't a finite number in ``(0, inf)`` and in ``[least, most]``.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ScalerSettingError(f"{name} must be a number, got {value!r} ({type(value).__name__}).")
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ScalerSettingError(f"{name} must be finite and greater than 0, got {value!r}.")
    if not least <= number <= most:
        allowed = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise ScalerSettingError(f"{name} must be {allowed}, got {value!r}.")
    return number


def check_scale(name: str, value: Any, *, least: float = 0.0, most: float = math.inf) -> float:
    """Return a scale, rounded to float32.

    Raises:
        ScalerSettingError: As ``check_number``, or float32 can't hold the scale or its reciprocal.
    """
    number = float32(check_number(name, value, least=least, most=most))
    if number == 0 or math.isinf(number) or math.isinf(float32(1 / number)):
        raise ScalerSettingError(f"{name} must be a float32 number with a finite reciprocal, got {value!r}.")
    return number


def check_count(name: str, value: Any, *, least: int = 1) -> int:
    """Return a setting as an int that fits in 32 bits.

    Raises:
        ScalerSettingError: It isn't an integer in ``[least, 2**31)``.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ScalerSettingError(f"{name} must be an integer, got {value!r} ({type(value).__name__}).")
    if not least <= int(value) <= INT32_MAX:
        raise ScalerSettingError(f"{name} must be from {least} to {INT32_MAX}, got {value!r}.")
    return int(value)


@dataclass(frozen=True, slots=True)
class ScaleState:
    """A loss scale and what decides how it moves; a value that never changes.

    Attributes:
        scale: The loss scale: dimensionless, a float32 number, usually a power of two.
        growth_tracker: Updates without inf or NaN since the scale last moved; below ``growth_interval``.
        growth_factor: What the scale is multiplied by after ``growth_interval`` such updates; at least 1.
        backoff_factor: What it is multiplied by when an inf or NaN was found; at most 1.
        growth_interval: How many updates in a row without inf or NaN make the scale grow.
        min_scale: The scale never goes below it.
        max_scale: The scale never goes above it.

    Raises:
        ScalerSettingError: A value that can't be; the message names it.

    Example:
        >>> state = ScaleState(scale=1024.0, growth_interval=2)
        >>> state.next(found_inf=True).scale
        512.0
        >>> state.next(found_inf=False).next(found_inf=False).scale
        2048.0
    """

    scale: float = 2.0**16
    growth_tracker: int = 0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = MIN_SCALE
    max_scale: float = MAX_SCALE

    def __post_init__(self) -> None:
        low, high = check_scale("min_scale", self.min_scale), check_scale("max_scale", self.max_scale)
        if low > high:
            raise ScalerSettingError(f"min_scale ({low:g}) is greater than max_scale ({high:g}).")
        checked = {
            "min_scale": low,
            "max_scale": high,
            "scale": check_scale("scale", self.scale, least=low, most=high),
            "growth_factor": check_number("growth_factor", self.growth_factor, least=1.0),
            "backoff_factor": check_number("backoff_factor", self.backoff_factor, most=1.0),
            "growth_interval": check_count("growth_interval", self.growth_interval),
            "growth_tracker": check_count("growth_tracker", self.growth_tracker, least=0),
        }
        # torch compares for equality: a tracker at or past the interval would never make the scale grow again.
        checked["growth_tracker"] = min(checked["growth_tracker"], checked["growth_interval"] - 1)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def next(self, found_inf: bool) -> ScaleState:
        """Return the state after one update, in float32 arithmetic as ``torch._amp_update_scale_`` does it.

        Args:
            found_inf: Whether any gradient of the iteration was inf or NaN.

        Example:
            >>> ScaleState(scale=2.0, min_scale=1.5).next(found_inf=True).scale
            1.5
        """
        if found_inf:
            return replace(self, scale=self._bounded(float32(self.scale * self.backoff_factor)), growth_tracker=0)
        if self.growth_tracker + 1 < self.growth_interval:
            return replace(self, growth_tracker=self.growth_tracker + 1)
        grown = float32(self.scale * self.growth_factor)
        return replace(self, scale=self.scale if math.isinf(grown) else self._bounded(grown), growth_tracker=0)

    def _bounded(self, scale: float) -> float:
        return min(max(scale, self.min_scale), self.max_scale)
