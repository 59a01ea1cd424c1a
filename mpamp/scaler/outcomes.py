"""What became of a scaler's steps: known to the host only as far as it has waited for the device."""

from __future__ import annotations

import functools
import weakref
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..registry import device_state
from . import kernels
from .history import ScaleEvent, StepResult
from .watch import SkipWatch

__all__ = ["Outcomes"]


class Outcomes:
    """The last result of each optimizer, and the count of skips."""

    def __init__(self, limit: int | None) -> None:
        self.updates = 0
        self.watch = SkipWatch(limit)
        self._results: WeakKeyDictionary[torch.optim.Optimizer, StepResult] = WeakKeyDictionary()

    def last(self, optimizer: torch.optim.Optimizer) -> StepResult | None:
        """Return the result of the optimizer's last step, if it has made one."""
        return self._results.get(optimizer)

    def remember(self, optimizer: torch.optim.Optimizer, found_inf: Tensor, scale: Tensor) -> StepResult:
        """Keep a step's result; it is read at once where that costs nothing."""
        listeners = _listeners()
        tell = functools.partial(_tell, listeners, weakref.ref(optimizer)) if listeners is not None else None
        result = StepResult(self.updates + 1, torch.stack((found_inf, scale)), tell)
        self._results[optimizer] = result
        if kernels.is_on_host(found_inf):
            result.read()
        return result

    def end_update(self, found_inf: Tensor | None, checked: int) -> bool:
        """Count an update; tell whether it is time to report that there were too many skips.

        Args:
            found_inf: Shape []; None if no gradient was checked, and the update says nothing.
            checked: How many optimizers' gradients were.
        """
        is_due = found_inf is not None and self._count(found_inf, checked)
        self.updates += 1
        return is_due

    def _count(self, found_inf: Tensor, checked: int) -> bool:
        outcome = found_inf.tolist() > 0 if kernels.is_on_host(found_inf) else self._known(checked)
        if outcome is not None:
            return self.watch.saw(outcome)
        backend = device_state(found_inf.device.type).backend
        is_capturing = backend.capture_check()
        if is_capturing is not None and is_capturing():
            return False
        return self.watch.saw_on_device(found_inf, backend)

    def _known(self, checked: int) -> bool | None:
        results = [r for r in self._results.values() if r.step == self.updates + 1 and r.is_read]
        if any(result.skipped for result in results):
            return True
        return False if len(results) == checked else None


def _listeners() -> Any:
    from ..plugins.manager import manager

    hook = manager().hook().mpamp_scale_event
    return hook if hook.get_hookimpls() else None


def _tell(hook: Any, reference: weakref.ref[torch.optim.Optimizer], result: StepResult) -> None:
    optimizer = reference()
    if optimizer is not None:
        hook(event=ScaleEvent(result.step, result.scale, result.skipped, optimizer))
