"""Notices that a scaler has skipped for long, also where the host never waits for the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..backends.base import Backend
from ..errors import GradientOverflowError, MpampWarning
from .gradients import has_non_finite, name_gradients

__all__ = ["SkipWatch", "report_skips"]


class SkipWatch:
    """Counts updates in a row that found an inf or NaN, and tells each time that there were ``limit`` more of them."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.streak = 0
        """As far as the host knows."""
        self._told_at = 0
        self._on_device: Tensor | None = None
        self._arriving: Callable[[], Tensor | None] | None = None

    def saw(self, found_inf: bool) -> bool:
        """Count one update whose outcome the host knows; tell whether it is time to report."""
        self._on_device = self._arriving = None
        return self._is_due(self.streak + 1 if found_inf else 0)

    def saw_on_device(self, found_inf: Tensor, backend: Backend) -> bool:
        """Count one update whose outcome is on the device; tell whether it is time to report by what has arrived."""
        if self.limit is None:
            return False
        if self._on_device is None:
            self._on_device = torch.full((), self.streak, dtype=torch.float32, device=found_inf.device)
        self._on_device.add_(1).mul_(found_inf)
        arrived = None
        if self._arriving is not None:
            arrived = self._arriving()
        if self._arriving is None or arrived is not None:
            self._arriving = backend.read_later(self._on_device)
        return arrived is not None and self._is_due(int(arrived))

    def _is_due(self, streak: int) -> bool:
        if streak < self.streak:
            self._told_at = 0
        self.streak = streak
        if self.limit is None or streak - self._told_at < self.limit:
            return False
        self._told_at = streak
        return True


def report_skips(optimizers: Iterable[torch.optim.Optimizer], streak: int, *, as_error: bool) -> None:
    """Say that nothing has been trained for ``streak`` updates, and whose gradients are to blame.

    Reads every gradient of the optimizers; of DTensors only this rank's part, since ranks may come here at
    different times.

    Raises:
        GradientOverflowError: If it is to be an error.
    """
    named = [names for optimizer in optimizers if (names := name_gradients(optimizer, has_non_finite))]
    whose = "; ".join(named) or "none of this rank's at this moment"
    message = (
        f"the last {streak} updates in a row found an inf or NaN, so that steps were skipped and the loss scale fell. "
        f"Gradients that are not finite: {whose}. A scale cannot mend that: look for the inf or NaN in the loss, the "
        "inputs or these parameters, or lower the learning rate. max_consecutive_skips sets when this is said."
    )
    if as_error:
        raise GradientOverflowError(message)
    warnings.warn(message, MpampWarning, stacklevel=4)
