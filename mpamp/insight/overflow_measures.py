"""Numbers about tensors, kept on their devices until a step ends and then read at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..scaler.gradients import local_part, values_of
from ..scaler.kernels import is_on_host
from ..torch_internals import is_functorch_wrapped_tensor

__all__ = ["Identities", "Measures", "Range", "floats_in", "plain_of", "range_of"]


@dataclass(frozen=True, slots=True)
class Range:
    """The values of a tensor: all NaN where one of them is."""

    least: float
    greatest: float

    @property
    def absmax(self) -> float:
        """The largest magnitude."""
        return max(abs(self.least), abs(self.greatest)) if not self.has_nan else math.nan

    @property
    def has_nan(self) -> bool:
        """Whether a value is NaN."""
        return math.isnan(self.least) or math.isnan(self.greatest)

    @property
    def is_finite(self) -> bool:
        """Whether all values are finite."""
        return math.isfinite(self.least) and math.isfinite(self.greatest)

    def __str__(self) -> str:
        if self.has_nan:
            return "has NaN"
        return f"min {self.least:.4g}, max {self.greatest:.4g}, absmax {self.absmax:.4g}"


class Measures:
    """0-dim tensors, read together: one wait for the device, however many."""

    def __init__(self) -> None:
        self._places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        self._tensors: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        self.count = 0

    def add(self, *tensors: Tensor) -> int:
        """Keep some 0-dim tensors; return the place of the first one's value."""
        first = self.count
        for tensor in tensors:
            key = (tensor.device, tensor.dtype)
            self._tensors.setdefault(key, []).append(tensor)
            self._places.setdefault(key, []).append(self.count)
            self.count += 1
        return first

    def read(self) -> list[float]:
        """Return the values, in the order in which they were added."""
        if not self.count:
            return []
        wide = torch.float64 if any(dtype is torch.float64 for _, dtype in self._tensors) else torch.float32
        stacks = [torch.stack(tensors).to(wide) for tensors in self._tensors.values()]
        # On an accelerator if one has some: a copy to the host that isn't waited for can't be read.
        home = next((stack for stack in stacks if not is_on_host(stack)), stacks[0]).device
        places = [place for group in self._places.values() for place in group]
        found: Any = torch.cat([stack.to(home, non_blocking=True) for stack in stacks]).tolist()
        values = [0.0] * self.count
        for place, value in zip(places, found, strict=True):
            values[place] = value
        return values


def range_of(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the least and the greatest value of a plain floating or complex tensor; None if it has no values."""
    plain = values_of(tensor)
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    if plain.numel() == 0:
        return None
    if plain.dtype.itemsize == 1:
        plain = plain.float()
    least, greatest = torch.aminmax(plain)
    return least, greatest


def plain_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor whose values a tensor has: this rank's of a DTensor; None where there are none to look at."""
    if is_functorch_wrapped_tensor(tensor):
        return None
    plain = local_part(tensor)
    has_dispatch = type(plain).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return None if has_dispatch or plain.is_nested or plain.device.type == "meta" else plain


def floats_in(value: Any) -> list[tuple[str, Tensor]]:
    """Return the floating and complex tensors of a call's argument or result, with their place in it."""
    if isinstance(value, Tensor):
        return [("", value)] if value.is_floating_point() or value.is_complex() else []
    if isinstance(value, dict):
        return [(f"[{key!r}]{rest}", t) for key, item in value.items() for rest, t in floats_in(item)]
    if isinstance(value, list | tuple):
        return [(f"[{i}]{rest}", t) for i, item in enumerate(value) for rest, t in floats_in(item)]
    return []


class Identities:
    """Which tensors hold the same values: those that view the same memory alike, as it was at the same write.

    A weak reference keeps a storage's address from being given to another one, and none of its memory.
    """

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}

    def key(self, tensor: Tensor) -> tuple[Any, ...] | None:
        """Return what tells the tensor's values from others, or None for a tensor without a storage."""
        storage = self.storage(tensor)
        if storage is None:
            return None
        version = 0 if tensor.is_inference() else tensor._version
        return (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, version)

    def is_gone(self, storage: int) -> bool:
        """Tell whether nobody has a storage's memory any more."""
        return bool(self._storages[storage].expired())

    def knows(self, tensor: Tensor) -> bool:
        """Tell whether the tensor's memory has been asked for before; True where it has no storage."""
        if tensor.layout is not torch.strided:
            return True
        try:
            return int(tensor.untyped_storage()._cdata) in self._storages
        except (NotImplementedError, RuntimeError):
            return True

    def storage(self, tensor: Tensor) -> int | None:
        """Return what tells the tensor's memory from other memory."""
        if tensor.layout is not torch.strided:
            return None
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a subclass that wraps others
            return None
        address = int(storage._cdata)
        if address not in self._storages:
            self._storages[address] = StorageWeakRef(storage)
        return address
