"""What the ``amp`` namespaces of the devices share."""

from __future__ import annotations

import functools
import importlib
from typing import Any

__all__ = ["grad_scaler"]


@functools.cache
def grad_scaler(device_type: str, module: str) -> type:
    """Return ``mpamp.GradScaler`` for one device, with the arguments of ``torch.cuda.amp.GradScaler``.

    Args:
        device_type: The device.
        module: The namespace that it belongs to, for pickle.

    Example:
        >>> grad_scaler("cpu", "mpamp.backends.cpu.amp")(init_scale=4.0).get_scale()
        4.0
    """
    base: Any = importlib.import_module("mpamp.scaler").GradScaler

    class GradScaler(base):  # type: ignore[misc]
        def __init__(
            self,
            init_scale: float = 2.0**16,
            growth_factor: float = 2.0,
            backoff_factor: float = 0.5,
            growth_interval: int = 2000,
            enabled: bool = True,
        ) -> None:
            super().__init__(device_type, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    GradScaler.__module__, GradScaler.__qualname__, GradScaler.__doc__ = module, "GradScaler", base.__doc__
    return GradScaler
