"""How long the steps of a script take, and what memory it took at most."""

from __future__ import annotations

import contextlib
import statistics
import sys
from array import array
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...devices.registry import devices_in_use

__all__ = ["Clock"]

_WARM_UP = 3
"""First steps that don't count: memory is asked for, and kernels are chosen, in them."""
_MOST = 100_000


class Clock:
    """Times from one optimizer's step to the next. Nothing waits for a device: in the long run it is the device's time.

    Example:
        >>> clock = Clock()
        >>> with clock.running():
        ...     pass
        >>> clock.steps, clock.to_dict()["step_ms"]
        (0, None)
    """

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self._times = array("d")
        self._last: float | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Measure inside."""
        begun = perf_counter()
        handle = register_optimizer_step_post_hook(self._stepped)
        try:
            yield
        finally:
            handle.remove()
            self.seconds += perf_counter() - begun

    def _stepped(self, *_: Any) -> None:
        now, before = perf_counter(), self._last
        self.steps, self._last = self.steps + 1, now
        if before is not None and self.steps > _WARM_UP and len(self._times) < _MOST:
            self._times.append(now - before)

    @property
    def step_ms(self) -> float | None:
        """The median time of a step, in ms; None where there are too few."""
        return statistics.median(self._times) * 1e3 if self._times else None

    def to_dict(self) -> dict[str, Any]:
        """Return what was measured, as values that JSON has: seconds, steps, ms a step, and bytes by place."""
        return {"seconds": self.seconds, "steps": self.steps, "step_ms": self.step_ms, "memory": peak_memory()}


def peak_memory() -> dict[str, int]:
    """Return the most bytes that each accelerator's tensors took, or those of the process where there is none."""
    found = {}
    kinds = {device.type for device in devices_in_use()}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    for kind in sorted(kinds | ({accelerator.type} if accelerator is not None else set())):
        module: Any = getattr(torch, kind, None)
        if hasattr(module, "max_memory_allocated") and module.is_initialized():
            found[kind] = int(module.max_memory_allocated())
    return found or _process()


def _process() -> dict[str, int]:
    try:
        import resource
    except ModuleNotFoundError:  # Windows has none
        return {}
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"process": most * (1 if sys.platform == "darwin" else 1024)}
