"""Facts about tensors that are alive, which go with their memory."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import torch

from ..engine.casts.cache import storage_of

__all__ = ["Facts"]

T = TypeVar("T")


class Facts(Generic[T]):
    """A mapping from tensors to what is known of them; views have what their base has, and nothing is kept alive."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[torch.UntypedStorage], T]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def get(self, tensor: torch.Tensor) -> T | None:
        """Return what is known of a tensor's memory."""
        storage = storage_of(tensor)
        entry = None if storage is None else self._found.get(storage._cdata)
        return entry[1] if entry is not None and entry[0]() is storage else None

    def put(self, tensor: torch.Tensor, fact: T) -> None:
        """Know this of a tensor's memory."""
        storage = storage_of(tensor)
        if storage is not None:
            number, found = storage._cdata, self._found

            def drop(ref: weakref.ref[torch.UntypedStorage]) -> None:
                if number in found and found[number][0] is ref:  # else the memory's place is another's by now
                    del found[number]

            found[number] = (weakref.ref(storage, drop), fact)

    def remove(self, tensor: torch.Tensor) -> None:
        """Know nothing of a tensor's memory."""
        storage = storage_of(tensor)
        if storage is not None:
            self._found.pop(storage._cdata, None)
