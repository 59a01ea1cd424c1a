"""What the cast cache holds: casts, what must still be true of their weights, and the storages they hang on."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ...torch_internals import len_torch_dispatch_stack
from .aliases import epoch_of
from .streams import Readiness

__all__ = ["Entries", "Entry", "Link", "begin_drop", "last_drop", "state_of"]

Tensor = torch.Tensor
Key = tuple[int, torch.dtype]
"""A weight's id, and the dtype that it was cast to. A tensor may get the id of one that is gone: ``Entry.owner``."""
_mode_depth = len_torch_dispatch_stack


_last_drop = [object()]
"""Stands for the last time that entries were dropped for a reason that no version counter shows."""


def last_drop() -> object:
    """Return what stands for the last such time: what was begun before it isn't kept."""
    return _last_drop[0]


def begin_drop() -> None:
    """Have what was begun until now not be kept; called before entries go."""
    _last_drop[0] = object()


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
        "owner",
        "readiness",
        "state",
        "storage",
        "version",
    )

    def __init__(
        self,
        low: Tensor,
        weight: Tensor,
        state: tuple[Any, ...],
        storage: torch.UntypedStorage,
        home: weakref.ref[Entries],
    ) -> None:
        self.low, self.version = low, low._version
        self.owner = weight.__dict__
        """The weight's attributes: each tensor has its own dictionary for them, and none gets one that is held here.

        So it stands for the weight, which nothing may refer to; ``swap_tensors`` swaps it with the rest."""
        self.state: tuple[Any, ...] | None = state
        """The weight's, as it was; None: the weight was written to past its counter."""
        self.number: int = storage._cdata
        self.storage = _hang(storage, home)
        self.graph: Link | None = None
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


class Link:
    """A cast that is linked to its weight's gradient: for all of its uses, as long as a graph has one of them.

    So the gradient is summed up in low precision and is cast back once. Some ops keep no tensor, but all keep the node.
    """

    __slots__ = ("cast", "node")

    def __init__(self, cast: Tensor) -> None:
        """Refer to the cast, and to its node, which has saved it, both weakly."""
        self.cast: weakref.ref[Tensor] = weakref.ref(cast)
        self.node: weakref.ref[Any] = weakref.ref(cast.grad_fn)

    def use(self) -> Tensor | None:
        """Return the cast, or another tensor of the same node; None where no graph has it any more."""
        cast = self.cast()
        if cast is not None:
            cast._fix_weakref()  # type: ignore[attr-defined]  # its Python object may belong to C++ by now
            return cast
        node = self.node()
        if node is None:
            return None
        try:
            return node.saved_tensors[0]  # type: ignore[no-any-return]
        except RuntimeError:  # a backward pass is through with it
            return None


def _hang(storage: torch.UntypedStorage, home: weakref.ref[Entries]) -> weakref.ref[torch.UntypedStorage]:
    """Refer to a storage such that its entries go with it: its Python object lives as long as the memory does."""
    number = storage._cdata

    def drop(_: object) -> None:
        entries = home()  # held weakly: they go with their thread
        if entries is not None:
            entries.forget(number)

    return weakref.ref(storage, drop)


class Entries(dict[Key, Entry]):
    """Entries of one thread, or of all: any thread may drop some.

    No lock is taken: storages die, and drop theirs, in the middle of anything. Each step is one of a dictionary's,
    which threads see as a whole, and an entry is listed by its storage as long as it is there.
    A storage has one entry a dtype: of two weights that share all of it, the one used last.
    """

    __slots__ = ("__weakref__", "home", "keys_of")

    def __init__(self, live: dict[int, weakref.ref[Entries]]) -> None:
        """Make entries that are among ``live`` as long as they are."""
        super().__init__()
        number = id(self)
        self.home = live[number] = weakref.ref(self, lambda _: live.pop(number, None))
        self.keys_of: dict[int, dict[Key, None]] = {}
        """By storage: the keys of its entries."""

    def put(self, key: Key, entry: Entry) -> None:
        self.remove(key)
        self[key] = entry
        for other in list(self._list(key, entry.number)):
            if other[1] is key[1] and other != key:
                self.remove(other)

    def _list(self, key: Key, storage: int) -> dict[Key, None]:
        keys: dict[Key, None] | None = None
        while keys is None or self.keys_of.get(storage) is not keys:  # another thread has taken them away
            keys = self.keys_of.setdefault(storage, {})
            keys[key] = None
        return keys

    def remove(self, key: Key) -> None:
        entry = self.pop(key, None)
        keys = None if entry is None else self.keys_of.get(entry.number)
        if entry is None or keys is None:
            return
        keys.pop(key, None)
        if not keys:
            last = last_drop()
            for late in list(self.keys_of.pop(entry.number, ())):  # another thread has just listed it
                self._list(late, entry.number)
                if last is not last_drop():
                    self.pop(late, None)

    def forget(self, storage: int) -> None:
        """Drop the entries that hang on a storage."""
        for key in list(self.keys_of.pop(storage, ())):
            self.pop(key, None)

    def outdate(self, storage: int) -> None:
        """Have the entries that hang on a storage be served no more, but stay until they are made anew."""
        for key in list(self.keys_of.get(storage, ())):
            entry = self.get(key)
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
