"""Which device types are absent, and what a name of one of them means here."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch

from ..devices.registry import device_state
from ..engine.marks import CARRIERS
from ..errors import MpampError
from ..plugins.backend import Backend
from ..plugins.manager import BUILTIN

__all__ = ["Target"]


class Target:
    """The device that things go to which are meant for one that this machine lacks.

    Args:
        device: Where they go; it is on this machine.
        absent: The absent ones of the device types that torch has a namespace for. Found out if not given: then
            backends are asked for, which run kernels and load plugins.

    Example:
        >>> target = Target(torch.device("cpu"))
        >>> target.present("cpu:0"), target.present(torch.float32)
        ('cpu:0', torch.float32)
    """

    def __init__(self, device: torch.device, absent: Iterable[str] | None = None) -> None:
        self.device = device
        self._are_absent: dict[str, bool] = {}
        if absent is not None:
            given = tuple(absent)
            self._are_absent.update((name, name in given) for name in BUILTIN)
        # Asked before anything is replaced: afterwards an absent device says that it is there.
        self.absent = tuple(name for name in BUILTIN if name != device.type and self.is_absent(name))
        """The absent device types that torch has a namespace for."""
        self.accelerator = torch.accelerator.current_accelerator(check_available=True)
        self.is_accelerator = self.accelerator is not None and self.accelerator.type == device.type

    @cached_property
    def backend(self) -> Backend:
        """The backend of the device that things go to."""
        return device_state(self.device.type).backend

    def is_absent(self, name: str) -> bool:
        """Tell whether this is the name of a device type that has AMP, and of which this machine has none."""
        found = self._are_absent.get(name)
        if found is None:
            found = self._are_absent[name] = name != self.device.type and _is_absent(name)
        return found

    def present(self, value: Any) -> Any:
        """Return the device for what names an absent one: a string, a device, or an index; anything else as it is."""
        if isinstance(value, str):
            return self.device if self.is_absent(value.partition(":")[0]) else value
        if isinstance(value, torch.device):
            return self.device if self.is_absent(value.type) else value
        if type(value) is int and self.accelerator is None:  # an index is of the accelerator
            return self.device
        return value

    def present_type(self, value: Any) -> Any:
        """Return the device type for the name of an absent one, as arguments called ``device_type`` have it."""
        if value in CARRIERS.names:  # compiled code enters them with a mark; to ask for such a device puts it into use
            return value
        found = self.present(value)
        return found.type if found is self.device else found

    def is_here(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is on the device that stands in for the absent ones."""
        return tensor.device.type == self.device.type


def _is_absent(name: str) -> bool:
    try:
        return torch.amp.is_autocast_available(name) and not device_state(name).backend.is_available()
    except (RuntimeError, MpampError):
        return False
