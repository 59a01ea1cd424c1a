"""What O1 and O4 cast: the op table ``apex``, and the functions that torch makes of several ops."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
import torch.nn.functional as F

from ..devices.registry import get_backend
from ..functions.annotated import casting
from ..patching import Patches
from ..regions.region import autocast
from ..rules.optable import OpTable
from . import ambient, blocks
from .masters import LOW

__all__ = ["FLOAT_COMPOSITES", "enter"]

FLOAT_COMPOSITES = ("interpolate", "local_response_norm", "multilabel_soft_margin_loss")
"""Float functions of ``torch.nn.functional`` whose first ops would run in lower precision if only ops were cast."""


def enter(devices: Set[str], dtype: torch.dtype, *, cache: bool, allow_banned: bool) -> None:
    """Put the process into regions of the apex tables.

    Args:
        devices: Device types; the accelerator, or the processor where there is none, if empty.
        dtype: What is lower precision.
        cache: Whether casts of weights are kept.
        allow_banned: Run banned ops in float32.
    """
    host = torch.empty(0, device=torch.get_default_device()).device.type
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found = set(devices) if devices else {host if accelerator is None else accelerator.type}
    if accelerator is not None and found == {host}:
        found.add(accelerator.type)  # the model may be moved there later
    regions = []
    for device in sorted(d for d in found if torch.amp.is_autocast_available(d)):
        table = OpTable.named("apex", get_backend(device).device_type)
        if allow_banned:
            table = table.override({"binary_cross_entropy": "fp32"}, source="allow_banned")
        regions.append(autocast(device, dtype, cache_enabled=cache, ops=table))
    ambient.install(regions, _patch)


def _patch(patches: Patches) -> None:
    patches.wrap(torch.Tensor, "cpu", _float_on_host)
    for name in FLOAT_COMPOSITES:
        patches.wrap(F, name, lambda function: casting(function, "fp32"))


def _float_on_host(cpu: Any) -> Any:
    def wrapper(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = cpu(self, *args, **kwargs)
        is_cast = result.dtype in LOW and blocks.is_casting() and self.device.type in blocks.devices()
        return result.float() if is_cast else result

    return wrapper
