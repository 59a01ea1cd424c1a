"""Stands in for ``torch.cuda.amp``: only the import of a script changes.

Example:
    >>> from mpamp.backends.cuda import amp
    >>> amp.autocast(enabled=False).device_type
    'cuda'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.cuda.amp.common import amp_definitely_not_available

from ...functions import custom as _custom
from ...regions.region import Region
from ...regions.region import autocast as _autocast
from ..dropin import grad_scaler

if TYPE_CHECKING:
    GradScaler: Any

__all__ = ["amp_definitely_not_available", "autocast", "custom_bwd", "custom_fwd", "GradScaler"]


def autocast(
    enabled: bool = True, dtype: torch.dtype | str | None = torch.float16, cache_enabled: bool = True
) -> Region:
    """Return ``mpamp.autocast("cuda", ...)``; the arguments go by position as in ``torch.cuda.amp.autocast``."""
    return _autocast("cuda", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


def custom_fwd(fwd: Callable[..., Any] | None = None, *, cast_inputs: torch.dtype | str | None = None) -> Any:
    """Return ``mpamp.custom_fwd(fwd, device_type="cuda", cast_inputs=cast_inputs)``."""
    return _custom.custom_fwd(fwd, device_type="cuda", cast_inputs=cast_inputs)


def custom_bwd(bwd: Callable[..., Any]) -> Any:
    """Return ``mpamp.custom_bwd(bwd, device_type="cuda")``."""
    return _custom.custom_bwd(bwd, device_type="cuda")


def __getattr__(name: str) -> Any:
    if name == "GradScaler":
        return grad_scaler("cuda", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
