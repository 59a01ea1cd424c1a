"""What this machine has for mixed precision: its devices, what each lower precision is worth there, and the engine."""

from __future__ import annotations

from typing import Any

import torch

from .. import engine
from ..devices.registry import DeviceState, device_state
from ..engine import needs_kernel
from ..errors import MpampError
from ..plugins.backend import Backend
from ..torch_internals import get_kernel
from .records import name_of

__all__ = ["describe_device", "describe_engine"]


def describe_device(device: DeviceState) -> dict[str, Any]:
    """Return what a device is, as values that JSON has.

    Example:
        >>> describe_device(device_state("cpu"))["default_dtype"]
        'bfloat16'
    """
    backend, own = device.backend, type(device.own_backend)
    is_available = backend.is_available()
    dtypes = {name_of(d): _support(backend, d) if is_available else "absent" for d in backend.lower_precision_dtypes}
    return {
        "type": backend.device_type,
        "available": is_available,
        "count": _count(backend.device_type) if is_available else 0,
        "name": _name(backend.device_type) if is_available else None,
        "backend": f"{own.__module__}.{own.__qualname__}",
        "default_dtype": name_of(backend.default_dtype),
        "dtypes": dtypes,
        "faults": backend.known_faults() if is_available else [],
    }


def _support(backend: Backend, dtype: torch.dtype) -> str:
    return "emulated" if backend.is_emulated(dtype) else "real"


def _count(device_type: str) -> int:
    count = getattr(getattr(torch, device_type, None), "device_count", None)
    return 1 if count is None else int(count())


def _name(device_type: str) -> str | None:
    name = getattr(getattr(torch, device_type, None), "get_device_name", None)
    if name is not None:
        return str(name())
    capability = getattr(getattr(torch.backends, device_type, None), "get_cpu_capability", None)
    return None if capability is None else str(capability())


def describe_engine(device_type: str) -> dict[str, Any] | None:
    """Return whose kernels a region of the device's default table runs; None where it can't be entered."""
    try:
        device = device_state(device_type)
    except MpampError:
        return None  # whoever lists the devices has said why
    ours = needs_kernel(device, device.table, device.backend.default_dtype)
    name, why = engine.which()
    return {
        "name": name,
        "why": why,
        "device": device_type,
        "mpamp_kernels": len(ours),
        "torch_kernels": len(set(device.table) - set(ours)),
        "keeps_torch_kernels": get_kernel is not None,
    }
