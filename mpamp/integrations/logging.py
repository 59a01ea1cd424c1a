"""Loss scales and skipped steps, in TensorBoard or any other logger.

Fed by the hook ``mpamp_scale_event``, which is called when the host learns of a step anyway: logging never makes it
wait for the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch

from ..plugins.events import ScaleEvent
from ..plugins.manager import manager

__all__ = ["ScaleEventLog", "log_scale_events"]

_numbers = itertools.count(1)


def log_scale_events(
    log: Any,
    *,
    prefix: str = "amp/",
    optimizers: Mapping[str, torch.optim.Optimizer] | None = None,
    step: Callable[[], int] | None = None,
) -> ScaleEventLog:
    """Log the scale of each step from now on, and whether it was skipped (1 or 0), until the result is closed.

    Steps of fused optimizers on an accelerator are logged when ``scaler.last_step_skipped`` or ``last_step`` is asked,
    for before that the host doesn't know. What ``log`` raises is one warning, and ends the logging.

    Args:
        log: Called as ``log(name, value, step)``; or an object whose ``add_scalar`` is, such as TensorBoard's
            ``SummaryWriter``.
        prefix: What the names ``scale`` and ``skipped`` start with.
        optimizers: Only steps of these are logged, as ``scale/NAME`` and ``skipped/NAME``. None: those of all.
        step: Gives the step to log at. None: the number of the scaler's update, from 1 in each process.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> from mpamp import GradScaler
        >>> scaler = GradScaler("cpu", init_scale=1024.0)
        >>> with log_scale_events(print):
        ...     scaler.scale(model(torch.ones(4, 2)).sum()).backward()
        ...     scaler.step(optimizer)
        amp/scale 1024.0 1
        amp/skipped 0 1
    """
    return ScaleEventLog(getattr(log, "add_scalar", log), prefix, optimizers, step)


class ScaleEventLog:
    """Logs until it is closed, or its ``with`` block ends. Made by ``log_scale_events``."""

    def __init__(
        self,
        log: Callable[[str, float, int], Any],
        prefix: str,
        optimizers: Mapping[str, torch.optim.Optimizer] | None,
        step: Callable[[], int] | None,
    ) -> None:
        self._log = log
        self._prefix = prefix
        self._optimizers = None if optimizers is None else dict(optimizers)
        self._step = step
        self._name = f"{__name__}-{next(_numbers)}"
        manager().add(self, self._name)

    def mpamp_scale_event(self, event: ScaleEvent) -> None:
        """Log one step of one optimizer."""
        suffix = self._suffix(event.optimizer)
        if suffix is None:
            return
        step = event.step if self._step is None else self._step()
        self._log(f"{self._prefix}scale{suffix}", event.scale, step)
        self._log(f"{self._prefix}skipped{suffix}", int(event.skipped), step)

    def _suffix(self, optimizer: torch.optim.Optimizer) -> str | None:
        if self._optimizers is None:
            return ""
        return next((f"/{name}" for name, known in self._optimizers.items() if known is optimizer), None)

    def close(self) -> None:
        """Log no more. May be called again."""
        manager().remove(self._name)

    def __enter__(self) -> ScaleEventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
