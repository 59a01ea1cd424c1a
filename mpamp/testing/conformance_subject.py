"""What the conformance kit looks at: a backend, put in force for its device, and where its tensors are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..devices.registry import DeviceState, device_state
from ..engine import withdraw
from ..plugins.backend import Backend
from ..regions.region import Region, autocast, forget_regions
from ..scaler import GradScaler
from ..torch_internals import FakeTensorMode
from .conformance_report import Inapplicable

__all__ = ["Subject", "Test", "in_force", "is_fakeable"]

Test = tuple[str, Callable[[], object]]
"""A check's name, and what makes it."""


@dataclass(frozen=True, slots=True)
class Subject:
    """One backend under test."""

    backend: Backend
    state: DeviceState
    is_fake: bool
    default_dtype: torch.dtype | None = None
    make_scaler: Callable[..., Any] = GradScaler

    @property
    def device(self) -> str:
        """The device type."""
        return self.backend.device_type

    @property
    def is_accelerator(self) -> bool:
        """Whether it is the accelerator of this machine."""
        here = torch.accelerator.current_accelerator(check_available=True)
        return here is not None and here.type == self.device

    def tensors(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which tensors of the device can be made."""
        return FakeTensorMode(allow_non_fake_inputs=True) if self.is_fake else contextlib.nullcontext()

    def rand(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor of random numbers on the device; a fake one has none."""
        if self.is_fake:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return torch.rand(shape, dtype=dtype).to(self.device)

    def region(self, dtype: torch.dtype | None = None, **options: Any) -> Region:
        """Return a region of the device."""
        return autocast(self.device, dtype, **options)

    def mm_dtype(self, x: torch.Tensor) -> torch.dtype:
        """Return the dtype that a matrix product has here."""
        return torch.mm(x, x).dtype

    def need_values(self) -> None:
        """Skip the check where tensors have no values."""
        if self.is_fake:
            raise Inapplicable("needs the device itself: fake tensors have no values")


def is_fakeable(device_type: str) -> bool:
    """Tell whether fake tensors of a device can be made here; beside another accelerator torch may refuse."""
    try:
        with FakeTensorMode():
            torch.empty(1, device=device_type)
    except (RuntimeError, AssertionError, NotImplementedError):
        return False
    return True


@contextlib.contextmanager
def in_force(backend: Backend) -> Iterator[DeviceState]:
    """Have regions of a backend's device ask that backend, whichever is registered for it."""
    state = device_state(backend.device_type)
    registered = state.backend
    if registered is backend:
        yield state
        return
    try:
        _stand_in(state, backend)
        yield state
    finally:
        _stand_in(state, registered)


def _stand_in(state: DeviceState, backend: Backend) -> None:
    withdraw(state)  # kernels ask the backend which tensors are on its device when they are built
    state.ask(backend)
    forget_regions(state.type)
