"""Autocast, by torch's names, asked for on an absent device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..devices.registry import serve_by
from ..regions.region import forget_regions
from .patches import Patches
from .target import Target

__all__ = ["redirect_autocast", "serve_regions"]


def redirect_autocast(patches: Patches, target: Target) -> None:
    """Have torch's regions, scalers, decorators and autocast state for an absent device be the present one's."""
    for owner in (torch.amp.autocast_mode.autocast, torch.amp.GradScaler):
        patches.wrap(owner, "__init__", lambda original: _with_type(original, target, 1))
    for name in ("custom_fwd", "custom_bwd"):
        patches.wrap(torch.amp, name, lambda original: _with_type(original, target, None))
        patches.wrap(torch.amp.autocast_mode, name, lambda original: _with_type(original, target, None))
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        patches.wrap(torch, name, lambda original: _constant(_with_type(original, target, 0)))
    for name in ("set_autocast_enabled", "set_autocast_dtype"):
        patches.wrap(torch, name, lambda original: _with_type(original, target, 0))
    _redirect_older_names(patches, target)


def _constant(function: Any) -> Any:
    """Have Dynamo ask while it traces, as it asks torch's own function: it guards the state of autocast."""
    function._dynamo_marked_constant = True
    return function


def _with_type(original: Callable[..., Any], target: Target, place: int | None) -> Callable[..., Any]:
    present = target.present_type

    def function(*args: Any, **kwargs: Any) -> Any:
        if place is not None and len(args) > place and not isinstance(args[place], bool):
            args = (*args[:place], present(args[place]), *args[place + 1 :])
        for name in ("device_type", "device"):
            if name in kwargs:
                kwargs[name] = present(kwargs[name])
        return original(*args, **kwargs)

    return function


def _redirect_older_names(patches: Patches, target: Target) -> None:
    """Redirect what speaks of one device and names none."""
    device_type = target.device.type
    is_enabled: Any = torch.is_autocast_enabled
    set_enabled: Any = torch.set_autocast_enabled

    def get_autocast_gpu_dtype() -> torch.dtype:
        return torch.get_autocast_dtype(device_type)

    def set_autocast_gpu_dtype(dtype: torch.dtype) -> None:
        torch.set_autocast_dtype(device_type, dtype)

    def is_autocast_enabled(*args: Any) -> bool:
        return bool(is_enabled(*(args or (device_type,))))

    def set_autocast_enabled(*args: Any) -> None:
        set_enabled(*(args if len(args) > 1 else (device_type, *args)))

    patches.wrap(torch, "is_autocast_enabled", lambda _: _constant(is_autocast_enabled))
    patches.wrap(torch, "set_autocast_enabled", lambda _: set_autocast_enabled)
    patches.wrap(torch, "get_autocast_gpu_dtype", lambda _: _constant(get_autocast_gpu_dtype))
    patches.wrap(torch, "set_autocast_gpu_dtype", lambda _: set_autocast_gpu_dtype)


def serve_regions(target: Target, *, is_on: bool) -> None:
    """Have mpamp's own regions, scalers and decorators for an absent device be the present one's; or no more."""
    for name in target.absent:
        forget_regions(name)
        serve_by(name, target.device.type if is_on else None)
    forget_regions(target.device.type)
