"""What the cast cache holds: casts, what must still be true of their weights, and the storages they hang on."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .aliases import epoch_of
from .streams import Readiness

__all__ = ["Entries", "Entry", "state_of"]

Tensor = torch.Tensor
Key = tuple[int, torch.dtype]
"""A weight's id, and the dtype that it was cast to."""
_mode_depth = torch._C._len_torch_dispatch_stack


def state_of(weight: Tensor) -> tuple[Any, ...]:
    """Return what changes where a weight is written to or given other data."""
    return (weight._version, weight.data_ptr(), weight.stride(), weight.shape, epoch_of(weight))


class Entry:
    """One cast, and what must still be true of the weight for it to count."""

    __slots__ = (
        "_weight",
        "depth",
        "graph",
        "is_alike",
        "is_used",
        "low",
        "number",
        "readiness",
        "state",
        "storage",
        "version",
    )

    def __init__(
        self, low: Tensor, state: tuple[Any, ...], storage: torch.UntypedStorage, home: weakref.ref[Entries]
    ) -> None:
        self.low, self.version = low, low._version
        self.state: tuple[Any, ...] | None = state
        """The weight's, as it was; None: the weight was written to past its counter."""
        self.number: int = storage._cdata
        self.storage = _hang(storage, home)
        self.graph: weakref.ref[Tensor] | None = None
        self._weight: Tensor | None = None
        self.depth = _mode_depth()
        """How many dispatch modes saw the cast being made: what they gave isn't for use outside of them."""
        self.readiness: Readiness | None = None
        self.is_alike = False
        """Whether views of the weight say by their strides where they lie in the cast, too."""
        self.is_used = True
        """Whether an op has had it since it was made."""

    def as_weight(self) -> Tensor:
        """Return the cast where no gradients are recorded, as a weight that wants some.

        So it looks as that of a model in lower precision, and ``matmul`` goes by it: a product of three dimensions
        with a weight that wants gradients is one of two, which some kernels do in a third of the time.
        """
        if self._weight is None:
            self._weight = self.low.detach().requires_grad_()
        return self._weight

    def let_go(self) -> None:
        """Hold the cast's memory by ``low`` alone."""
        self._weight = None

    def renew(self, low: Tensor, readiness: Readiness | None) -> None:
        """Hold another cast of the weight, which no op has had yet, in the same memory or in other."""
        self.let_go()
        self.low, self.version, self.readiness = low, low._version, readiness
        self.graph, self.is_used = None, False


def _hang(storage: torch.UntypedStorage, home: weakref.ref[Entries]) -> weakref.ref[torch.UntypedStorage]:
    """Refer to a storage such that its entries go with it: its Python object lives as long as the memory does."""
    number = storage._cdata

    def drop(_: object) -> None:
        entries = home()  # held weakly: they go with their thread
        if entries is not None:
            entries.forget(number)

    return weakref.ref(storage, drop)


class Entries(dict[Key, Entry]):
    """One thread's entries; other threads may drop some, but add none.

    A storage has one entry a dtype: of two weights that share all of it, the one used last.
    """

    __slots__ = ("__weakref__", "casts", "home", "keys_of", "recasts")

    def __init__(self, live: dict[int, weakref.ref[Entries]]) -> None:
        """Make entries that are among ``live`` as long as they are."""
        super().__init__()
        number = id(self)
        self.home = live[number] = weakref.ref(self, lambda _: live.pop(number, None))
        self.keys_of: dict[int, dict[torch.dtype, int]] = {}
        """By storage: each dtype of its entries, and the weight's id."""
        self.casts = 0
        """How many were made, those that are gone included."""
        self.recasts = 0
        """How many of them after a step of an optimizer."""

    def put(self, key: Key, entry: Entry) -> None:
        number, dtype = key
        self.remove(key)
        ids = self.keys_of.setdefault(entry.number, {})
        self.pop((ids.get(dtype, number), dtype), None)
        ids[dtype] = number
        self[key] = entry

    def remove(self, key: Key) -> None:
        entry = self.pop(key, None)
        if entry is not None:
            ids = self.keys_of.get(entry.number, {})
            ids.pop(key[1], None)
            if not ids:
                self.keys_of.pop(entry.number, None)

    def forget(self, storage: int) -> None:
        """Drop the entries that hang on a storage."""
        for dtype, number in list(self.keys_of.pop(storage, {}).items()):
            self.pop((number, dtype), None)

    def outdate(self, storage: int) -> None:
        """Have the entries that hang on a storage be served no more, but stay until they are made anew."""
        for dtype, number in list(self.keys_of.get(storage, {}).items()):
            entry = self.get((number, dtype))
            if entry is not None:
                entry.state = None

    def clear(self) -> None:
        super().clear()
        self.keys_of.clear()

    def sweep(self) -> None:
        """Drop the entries of storages that were freed in place: they can't come back unchanged."""
        for entry in list(self.values()):
            storage = entry.storage()
            if storage is None or not storage.nbytes():
                self.forget(entry.number)
