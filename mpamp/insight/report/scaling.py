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
from torch.amp.grad_scaler import OptState

from ...devices.registry import is_capturing
from ...engine.compiling import left_to_python
from ...patching import Patches
from ...scaler.gradients import has_non_finite
from ...scaler.scaler import GradScaler
from ...scaler.stepping import SteppingPart
from ...scaler.unscaling import UnscalingPart
from ..overflow_report import Overflow
from .roots import Roots
from .steps import StepWatch
from .training import TrainingWatch

__all__ = ["ScaleLog", "ScalerWatch", "Skip"]

_MOST_POINTS = 2000
_MOST_SKIPS = 500
_MOST_LOGS = 20
_MOST_NAMES = 8
_START_UP = 16
"""Attempts among which a skip is the search for a scale: torch's first one, 65536, is 1 after as many."""


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
    start_up: int = 0
    """Skips of the first steps, in which the scale had only gone down: so a scaler finds the first one that fits."""
    _has_grown: bool = False

    def add(self, scale: float, skipped: bool) -> Skip | None:
        """Add an attempt; return its skip, if it was one and is still listed."""
        self.attempts += 1
        self._has_grown |= bool(self.points) and self.points[-1][1] < scale
        if not self.points or self.points[-1][1] != scale:
            self.points.append((self.attempts, scale))
            if len(self.points) > _MOST_POINTS:
                del self.points[1:-1:2]
        if not skipped:
            return None
        self.skipped += 1
        if not self._has_grown and (self.attempts <= _START_UP or self.start_up == self.attempts - 1):
            self.start_up += 1
        if len(self.skips) >= _MOST_SKIPS:
            return None
        self.skips.append(Skip(self.attempts, scale))
        return self.skips[-1]

    def scale_at(self, attempt: int) -> float:
        """Return the scale of an attempt, as far as it is known still."""
        return next(scale for first, scale in reversed(self.points) if first <= attempt)

    @property
    def has_trained(self) -> bool:
        """Whether a step wasn't skipped."""
        return self.skipped < self.attempts


class ScalerWatch:
    """Listens to the gradient scalers of torch, of mpamp and, where it is loaded, of apex's drop-in."""

    def __init__(self, steps: StepWatch, roots: Roots, training: TrainingWatch) -> None:
        self.logs: list[ScaleLog] = []
        self._steps, self._roots, self._training = steps, roots, training
        self._by_scaler: WeakKeyDictionary[Any, ScaleLog] = WeakKeyDictionary()
        self._is_open = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen inside. Classes are put back at the end; a scaler goes on as if nobody had listened."""
        places: list[tuple[type, str, Callable[..., Any]]] = [
            (torch.amp.GradScaler, "scale", self._scale),
            (torch.amp.GradScaler, "step", self._step),
            (torch.amp.GradScaler, "unscale_", self._unscale),
            (torch.amp.GradScaler, "update", self._updated),
            (UnscalingPart, "scale", self._scale),
            (UnscalingPart, "unscale_", self._unscale),
            (SteppingPart, "step", self._step),
            (GradScaler, "update", self._updated),
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
            self._training.scaled(scaler)
        return original(scaler, *args, **kwargs)

    def _unscale(self, original: Callable[..., Any], scaler: Any, optimizer: Any) -> Any:
        if self._is_open and scaler._enabled:
            self._training.unscaled(optimizer)
        return original(scaler, optimizer)

    def _updated(self, original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        self._training.updated()
        return original(scaler, *args, **kwargs)

    def _step(self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not (self._is_open and scaler._enabled) or is_capturing(scaler._device):
            return original(scaler, optimizer, *args, **kwargs)
        self._steps.end()
        state = scaler._per_optimizer_states.get(id(optimizer), {})
        if state.get("stage") is OptState.UNSCALED:
            self._training.were_unscaled(optimizer)  # by a method of its own, it may be
        else:
            self._training.unscaled(optimizer)
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
