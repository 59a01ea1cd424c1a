"""What the scalers of a script do: each attempt to step, its scale, and whose fault a skip was."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ...engine.compiling import left_to_python
from ...patching import Patches
from ...scaler.gradients import has_non_finite
from ...scaler.kernels import is_capturing
from ...scaler.stepping import SteppingPart
from ...scaler.unscaling import UnscalingPart
from ..overflow_report import Overflow
from .roots import Roots
from .steps import StepWatch

__all__ = ["ScaleLog", "ScalerWatch", "Skip"]

_MOST_POINTS = 2000
_MOST_SKIPS = 500
_MOST_LOGS = 20
_MOST_NAMES = 8


@dataclass(slots=True)
class Skip:
    """A step that a scaler skipped."""

    attempt: int
    scale: float
    parameters: tuple[str, ...] = ()
    """Those whose gradients had an inf or NaN: the first few."""
    more: int = 0
    overflow: Overflow | None = None
    """What made it, where the step was looked at."""


@dataclass(slots=True)
class ScaleLog:
    """One scaler's attempts to step, added up: the scale where it changed, and the skips."""

    kind: str
    attempts: int = 0
    skipped: int = 0
    points: list[tuple[int, float]] = field(default_factory=list)
    """From which attempt on the scale was what."""
    skips: list[Skip] = field(default_factory=list)
    """The first of them."""

    def add(self, scale: float, skipped: bool) -> Skip | None:
        """Add an attempt; return its skip, if it was one and is still listed."""
        self.attempts += 1
        if not self.points or self.points[-1][1] != scale:
            self.points.append((self.attempts, scale))
            if len(self.points) > _MOST_POINTS:
                del self.points[1:-1:2]
        if not skipped:
            return None
        self.skipped += 1
        if len(self.skips) >= _MOST_SKIPS:
            return None
        self.skips.append(Skip(self.attempts, scale))
        return self.skips[-1]


class ScalerWatch:
    """Listens to the gradient scalers of torch, of mpamp and, where it is loaded, of apex's drop-in."""

    def __init__(self, steps: StepWatch, roots: Roots) -> None:
        self.logs: list[ScaleLog] = []
        self._steps, self._roots = steps, roots
        self._by_scaler: WeakKeyDictionary[Any, ScaleLog] = WeakKeyDictionary()
        self._is_open = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen inside. Classes are put back at the end; a scaler goes on as if nobody had listened."""
        places: list[tuple[type, str, Callable[..., Any]]] = [
            (torch.amp.GradScaler, "scale", self._scale),
            (torch.amp.GradScaler, "step", self._step),
            (UnscalingPart, "scale", self._scale),
            (SteppingPart, "step", self._step),
        ]
        apex = sys.modules.get("mpamp.apex.scaler")
        if apex is not None:
            places += [(apex.LossScaler, "loss_scale", self._ask), (apex.LossScaler, "update_scale", self._update)]
        patches = Patches()
        try:
            for owner, name, around in places:
                patches.wrap(owner, name, functools.partial(_listened, around))
            self._is_open = True
            yield
        finally:
            self._is_open = False
            patches.undo()

    # -- torch's scaler, and mpamp's -------------------------------------------------------------------

    def _scale(self, original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_open and scaler._enabled:
            self._steps.scaled_by(scaler)
        return original(scaler, *args, **kwargs)

    def _step(self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not (self._is_open and scaler._enabled) or is_capturing(scaler._device):
            return original(scaler, optimizer, *args, **kwargs)
        self._steps.end()
        returned = original(scaler, optimizer, *args, **kwargs)
        skipped = _was_skipped(scaler, optimizer)
        self._attempted(scaler, scaler.get_scale(), skipped, optimizer)
        return returned

    # -- apex's ----------------------------------------------------------------------------------------

    def _ask(self, original: Callable[..., Any], scaler: Any) -> Any:
        if self._is_open:
            self._steps.scaled_by(_Apexs(original, scaler))
        return original(scaler)

    def _update(self, original: Callable[..., Any], scaler: Any) -> Any:
        if not self._is_open:
            return original(scaler)
        self._steps.end()
        scale = scaler._loss_scale
        skipped = original(scaler)
        self._attempted(scaler, scale, bool(skipped), None)
        return skipped

    # -- Both ------------------------------------------------------------------------------------------

    def _attempted(self, scaler: Any, scale: float, skipped: bool, optimizer: Any) -> None:
        log = self._by_scaler.get(scaler)
        if log is None:
            log = self._by_scaler[scaler] = ScaleLog(f"{type(scaler).__module__}.{type(scaler).__qualname__}")
            if len(self.logs) < _MOST_LOGS:
                self.logs.append(log)
        skip = log.add(scale, skipped)
        dirty = self._steps.attempted(skipped)
        if skip is None:
            return
        if dirty is not None:
            skip.overflow = dirty.overflow
        names = dirty.parameters if dirty is not None and dirty.parameters else self._with_bad_gradients(optimizer)
        skip.parameters, skip.more = tuple(names[:_MOST_NAMES]), max(0, len(names) - _MOST_NAMES)

    def _with_bad_gradients(self, optimizer: Any) -> tuple[str, ...]:
        """Name the parameters whose gradients aren't finite; waits for the device, once for each of them."""
        known = self._roots.parameters()
        groups = [] if optimizer is None else optimizer.param_groups
        params = [p for group in groups for p in group["params"]] or [param for _, param in known.values()]
        bad = [(place, p) for place, p in enumerate(params) if p.grad is not None and has_non_finite(p.grad)]
        return tuple(known[id(p)][0] if id(p) in known else f"parameter {place}" for place, p in bad)


class _Apexs:
    """apex's scaler, asked as torch's is."""

    _scale = None

    def __init__(self, ask: Callable[..., Any], scaler: Any) -> None:
        self._ask, self._own = ask, scaler

    def get_scale(self) -> float:
        return float(self._ask(self._own))


def _was_skipped(scaler: Any, optimizer: Any) -> bool:
    """Tell whether the step that was just made was skipped; waits for the device."""
    last = getattr(scaler, "last_step_skipped", None)
    if last is not None:
        return bool(last(optimizer))
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return any(bool(value) for value in found.values())


def _listened(around: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @left_to_python
    @functools.wraps(original)
    def listened(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return listened
