"""Stands in for ``torch.cpu.amp``: only the import of a script changes.

Example:
    >>> from mpamp.backends.cpu import amp
    >>> amp.autocast(enabled=False).device_type
    'cpu'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ...functions import custom as _custom
from ...regions.region import Region
from ...regions.region import autocast as _autocast
from ..dropin import grad_scaler

if TYPE_CHECKING:
    GradScaler: Any

__all__ = ["autocast", "custom_bwd", "custom_fwd", "GradScaler"]


def autocast(
    enabled: bool = True, dtype: torch.dtype | str | None = torch.bfloat16, cache_enabled: bool = True
) -> Region:
    """Return ``mpamp.autocast("cpu", ...)``; the arguments go by position as in ``torch.cpu.amp.autocast``."""
    return _autocast("cpu", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


def custom_fwd(fwd: Callable[..., Any] | None = None, *, cast_inputs: torch.dtype | str | None = None) -> Any:
    """Return ``mpamp.custom_fwd(fwd, device_type="cpu", cast_inputs=cast_inputs)``."""
    return _custom.custom_fwd(fwd, device_type="cpu", cast_inputs=cast_inputs)


def custom_bwd(bwd: Callable[..., Any]) -> Any:
    """Return ``mpamp.custom_bwd(bwd, device_type="cpu")``."""
    return _custom.custom_bwd(bwd, device_type="cpu")


def __getattr__(name: str) -> Any:
    if name == "GradScaler":
        return grad_scaler("cpu", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
