"""The precisions that a workload is run in, and whose kernels are in the dispatcher meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from .. import engine
from ..devices.registry import device_state
from ..regions.region import autocast
from ..scaler import GradScaler
from .timing import Context

__all__ = ["BASE", "PRECISIONS", "Precision", "precisions_for", "use_mpamps_kernels", "use_torchs_kernels"]

BASE = "torch.autocast"
"""What the others are compared with."""


@dataclass(frozen=True)
class Precision:
    """One way to run a model.

    Attributes:
        name: What it is called in tables.
        region: Makes the region that a step runs in; takes a device type and ``dtype=``.
        scaler: The loss scaler of float16 training, if it needs one.
        is_pure: Whether the model itself is in lower precision.
        has_tf32: Whether float32 products may round their inputs to TF32.
        has_mpamps_kernels: Whether mpamp's kernels are in the dispatcher; without, torch is as if mpamp weren't there.
        is_eager_only: Whether it says nothing about compiled code.
    """

    name: str
    region: Callable[..., Any] | None = None
    scaler: type[torch.amp.GradScaler] | None = None
    is_pure: bool = False
    has_tf32: bool = False
    has_mpamps_kernels: bool = False
    is_eager_only: bool = False

    def make_region(self, device: torch.device, dtype: torch.dtype) -> Context:
        """Return what makes the region."""
        return nullcontext if self.region is None else functools.partial(self.region, device.type, dtype=dtype)

    def make_scaler(self, device: torch.device, dtype: torch.dtype) -> torch.amp.GradScaler:
        """Return a scaler, which does nothing where none is needed."""
        is_enabled = self.scaler is not None and dtype is torch.float16
        return (self.scaler or torch.amp.GradScaler)(device.type, enabled=is_enabled)

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Set the process as this precision wants it."""
        torch.set_float32_matmul_precision("high" if self.has_tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = self.has_tf32
        if self.has_mpamps_kernels:
            use_mpamps_kernels(device, dtype)
        else:
            use_torchs_kernels(device)


_ours: dict[str, Any] = {"scaler": GradScaler, "has_mpamps_kernels": True}
PRECISIONS = (
    Precision("float32"),
    Precision("float32 TF32", has_tf32=True),
    Precision("pure", is_pure=True),
    Precision(BASE, torch.autocast, torch.amp.GradScaler),
    Precision("mpamp", autocast, **_ours),
    Precision("mpamp persistent", functools.partial(autocast, persistent_cache=True), **_ours),
    Precision("torch.autocast over mpamp", torch.autocast, torch.amp.GradScaler, has_mpamps_kernels=True,
              is_eager_only=True),
)  # fmt: skip


def precisions_for(device: torch.device, *, is_compiled: bool) -> list[Precision]:
    """Return the precisions that a device has; TF32 is a processor's to say.

    Example:
        >>> [p.name for p in precisions_for(torch.device("cpu"), is_compiled=True)]
        ['float32', 'pure', 'torch.autocast', 'mpamp', 'mpamp persistent']
    """
    has_tf32 = getattr(torch.get_device_module(device), "is_tf32_supported", bool)()
    return [p for p in PRECISIONS if (has_tf32 or not p.has_tf32) and not (is_compiled and p.is_eager_only)]


def use_torchs_kernels(device: torch.device) -> None:
    """Take mpamp's kernels out of the dispatcher, so that ``torch.autocast`` runs as if mpamp weren't there."""
    if engine.installed(device.type):
        engine.withdraw(device_state(device.type))


def use_mpamps_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Put mpamp's kernels for the device's own table and regions of ``dtype`` into the dispatcher."""
    if not engine.installed(device.type):
        state = device_state(device.type)
        engine.install(state, state.table, dtype)
