"""Stands in for ``torch.xpu.amp`` of Intel's extension: only the import of a script changes.

Example:
    >>> from mpamp.backends.xpu import amp
    >>> amp.autocast(enabled=False).device_type
    'xpu'
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
    """Return ``mpamp.autocast("xpu", ...)``; the arguments go by position as in ``torch.xpu.amp.autocast``."""
    return _autocast("xpu", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


def custom_fwd(fwd: Callable[..., Any] | None = None, *, cast_inputs: torch.dtype | str | None = None) -> Any:
    """Return ``mpamp.custom_fwd(fwd, device_type="xpu", cast_inputs=cast_inputs)``."""
    return _custom.custom_fwd(fwd, device_type="xpu", cast_inputs=cast_inputs)


def custom_bwd(bwd: Callable[..., Any]) -> Any:
    """Return ``mpamp.custom_bwd(bwd, device_type="xpu")``."""
    return _custom.custom_bwd(bwd, device_type="xpu")


def __getattr__(name: str) -> Any:
    if name == "GradScaler":
        return grad_scaler("xpu", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
