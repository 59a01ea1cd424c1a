"""Notices that a scaler has skipped for long, also where the host never waits for the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..errors import GradientOverflowError, MpampWarning
from ..plugins.backend import Backend
from .gradients import has_non_finite, name_gradients

__all__ = ["SkipWatch", "report_skips"]

LONGEST_PERIOD = 16
"""Outcomes that are on the device are sent for after so many updates at the latest."""


class SkipWatch:
    """Counts updates in a row that found an inf or NaN, and tells each time that there were ``limit`` more of them."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.streak = 0
        """As far as the host knows."""
        self._told_at = 0
        self._period = 1 if limit is None else max(1, min(LONGEST_PERIOD, limit // 4))
        self._unsent = self._sent = 0
        self._arriving: Callable[[], Tensor | None] | None = None

    def saw(self, found_inf: bool) -> bool:
        """Count one update whose outcome the host knows; tell whether it is time to report."""
        self._unsent, self._arriving = 0, None
        return self._is_due(self.streak + 1 if found_inf else 0)

    def saw_on_device(self, rows: Tensor, backend: Backend) -> bool:
        """Count one update whose outcome is on the device; tell whether to report, by what has arrived by now.

        Args:
            rows: (scale, found_inf) pairs as one flat tensor, the last update's at its end.
            backend: The device's.
        """
        if self.limit is None:
            return False
        self._unsent += 1
        arrived = None if self._arriving is None else self._arriving()
        is_due = arrived is not None and self._take(arrived, self._sent)
        if arrived is not None:
            self._arriving = None
        if self._arriving is None and self._unsent >= self._period:
            self._arriving = backend.read_later(rows[-2 * self._unsent :])
            self._sent, self._unsent = self._unsent, 0
        return is_due

    def _take(self, rows: Tensor, updates: int) -> bool:
        found = rows.tolist()[1::2]
        trailing = next((n for n, found_inf in enumerate(reversed(found)) if not found_inf > 0), len(found))
        return self._is_due(self.streak + updates if trailing == len(found) else trailing)

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
    warnings.warn(message, MpampWarning, stacklevel=3)
