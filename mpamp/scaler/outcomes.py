"""What became of a scaler's steps: known to the host only as far as it has waited for the device."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..devices.registry import device_state, is_capturing
from . import kernels
from .history import History, ScaleEvent, StepResult
from .watch import SkipWatch

__all__ = ["Outcomes"]


class Outcomes:
    """The last result of each optimizer, the history, and the count of skips."""

    def __init__(self, limit: int | None, history: History) -> None:
        self.history = history
        self.updates = history.count
        self.watch = SkipWatch(limit)
        self._results: dict[int, tuple[Callable[[], object], StepResult]] = {}
        """By identity: an optimizer need not be hashable, nor weakly referable."""

    def last(self, optimizer: torch.optim.Optimizer) -> StepResult | None:
        """Return the result of the optimizer's last step, if it has made one."""
        reference, result = self._results.get(id(optimizer), (None, None))
        return result if reference is not None and reference() is optimizer else None

    def remember(self, optimizer: torch.optim.Optimizer, found_inf: Tensor, scale: Tensor) -> StepResult:
        """Keep a step's result; it is read at once where that costs nothing."""
        reference = self._reference(optimizer)
        listeners = _listeners()
        tell = functools.partial(_tell, listeners, reference) if listeners is not None else None
        result = StepResult(self.updates + 1, found_inf, scale, tell)
        self._results[id(optimizer)] = (reference, result)
        if kernels.is_on_host(found_inf):
            _ = result.skipped
        return result

    def _reference(self, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
        key, results = id(optimizer), self._results
        try:
            return weakref.ref(optimizer, lambda _: results.pop(key, None))
        except TypeError:
            return lambda: optimizer

    def count(self, scale: Tensor, found_inf: Tensor, checked: int) -> bool:
        """Count the update that ends an iteration; tell whether it is time to report that there were too many skips.

        Args:
            scale: Shape []; the scaler's own, before it moves.
            found_inf: Shape [].
            checked: How many optimizers' gradients were.
        """
        capturing = is_capturing(scale.device.type)
        rows = self.history.push(scale, found_inf, in_place=capturing)
        results = [result for _, result in self._results.values() if result.step == self.updates + 1]
        self.updates += 1
        for result in results:
            result.keep_scale(rows[-2])
        known = [result for result in results if result.is_read]
        if any(result.skipped for result in known):
            return self.watch.saw(True)
        if len(known) == checked:
            return self.watch.saw(False)
        if kernels.is_on_host(found_inf):
            value: Any = found_inf.tolist()
            return self.watch.saw(value > 0)
        return not capturing and self.watch.saw_on_device(rows, device_state(scale.device.type).backend)


def _listeners() -> Any:
    from ..plugins.manager import manager

    tell = functools.partial(manager().tell, "mpamp_scale_event", "scale events")
    return tell if manager().implementations("mpamp_scale_event") else None


def _tell(hook: Any, reference: Callable[[], Any], result: StepResult) -> None:
    optimizer = reference()
    if optimizer is not None:
        hook(event=ScaleEvent(result.step, result.scale, result.skipped, optimizer))
