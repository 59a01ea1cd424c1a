"""A weight's cast, kept until the weight changes or goes away.

Only float32 weights are kept: any ``nn.Parameter``, frozen or not, and any leaf that requires grad. An
entry holds the low-precision *data* and no autograd graph, for a graph would keep the weight alive; the
cast that is linked to the weight's gradient is held weakly, and linked anew where it is gone.

Casts for regions are their thread's. Those that outlive regions are all threads': a weight has one for the process.

Nothing refers to the weight itself, not even weakly: ``torch.utils.swap_tensors`` would refuse it then. What
an entry hangs on is the weight's storage. Writes that raise no version counter are told of by ``writes``; what
outlives regions is made anew after an optimizer's step by ``remaking``. A view of a weight has no entry: it is
given a view of the weight's.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ...torch_internals import len_torch_dispatch_stack
from .aliases import begin, epoch_of
from .entries import Entries, Entry, begin_drop, last_drop, state_of
from .linking import cast, guarded, linked, viewed
from .streams import Readiness
from .weights import REWRITTEN, is_all_of, is_apart, is_viewable, is_weight, storage_of

__all__ = [
    "PERSISTENT_CACHE",
    "REGION_CACHE",
    "COMPILED",
    "CacheInfo",
    "CastCache",
    "Kept",
    "KeptCast",
    "cache_info",
    "clear_cache",
    "forget",
    "is_weight",
    "kept",
    "last_drop",
    "outdate",
    "storage_of",
]

Tensor = torch.Tensor
StreamOf = Callable[[Tensor], int]
_is_grad_enabled, _is_inference = torch.is_grad_enabled, torch.is_inference_mode_enabled
_mode_depth = len_torch_dispatch_stack

# -- The cache -----------------------------------------------------------------------------------------


_live: dict[int, weakref.ref[Entries]] = {}
"""The entries of every cache."""


class _Local(threading.local):
    casts = recasts = 0

    def __init__(self, entries: Entries | None) -> None:
        self.entries = Entries(_live) if entries is None else entries


_WORTHWHILE = 8
"""Up to how many times a view's elements its weight may have for one region to cast all of it."""
_SMALL = 2**16
"""Elements: where casting all of a weight takes no longer than to queue the cast."""


class CastCache:
    """Kept casts, apart for each thread or of all.

    Args:
        is_lasting: Whether they outlive regions, so that any cast pays in the end; they are all threads' then.
    """

    def __init__(self, *, is_lasting: bool = False) -> None:
        self._local = _Local(Entries(_live) if is_lasting else None)
        self._is_lasting = is_lasting

    @property
    def entries(self) -> Entries:
        """The calling thread's entries, or all threads'."""
        return self._local.entries

    @property
    def casts(self) -> int:
        """How many casts the calling thread has made here, with either engine."""
        return self.own_casts + sum(int(core.casts(self._is_lasting)) for core in COMPILED)

    @property
    def own_casts(self) -> int:
        """How many of them the engine in Python has made."""
        return self._local.casts

    @property
    def recasts(self) -> int:
        """How many of these an optimizer's step has made."""
        return self._local.recasts

    def count(self, casts: int, recasts: int = 0) -> None:
        """Add to what the calling thread has made."""
        self._local.casts += casts
        self._local.recasts += recasts

    def find(
        self, tensor: Tensor, dtype: torch.dtype, stream_of: StreamOf | None = None, view: Tensor | None = None
    ) -> Tensor | None:
        """Return the kept cast of a weight to ``dtype``, linked to its gradient where one is needed, or None.

        ``stream_of`` numbers the stream that the tensor's device queues work on now; None if there is but one.
        With a ``view`` of the weight, return what that is of the cast, linked to the view's gradient.
        """
        if COMPILED and not _mode_depth():
            if view is not None and (is_apart(view) or view.untyped_storage() is not tensor.untyped_storage()):
                return None
            user = tensor if view is None else view
            return COMPILED[0].find(tensor, dtype, user, self._is_lasting, stream_of is not None)  # type: ignore[no-any-return]
        entry = self._local.entries.get((id(tensor), dtype))
        if (
            entry is None
            or entry.owner is not tensor.__dict__
            or entry.state != (tensor._version, tensor.data_ptr(), tensor.stride(), tensor.shape, epoch_of(tensor))
            or entry.storage() is not tensor.untyped_storage()
            or entry.version != entry.low._version
        ):
            return None
        if stream_of is not None and not _is_ready(entry, stream_of(tensor)):
            return None
        entry.is_used = True
        if view is not None:
            return viewed(entry, view)
        if entry.depth or _mode_depth():
            return guarded(entry, tensor)
        if not tensor.requires_grad or _is_inference():
            return entry.low
        return linked(entry, tensor) if _is_grad_enabled() else entry.as_weight()

    def of_view(
        self, view: Tensor, base: Tensor, dtype: torch.dtype, stream_of: StreamOf | None = None
    ) -> Tensor | None:
        """Return the cast of a float32 view to ``dtype`` as a view of its base's kept cast, which is made if need be.

        None where the base is no weight, or where there is no cast yet and the view, used in one region, is too
        small a part for it to pay.
        """
        found = self.find(base, dtype, stream_of, view)
        if found is not None:
            return found
        if is_apart(view) or not is_viewable(base) or view.untyped_storage() is not base.untyped_storage():
            return None
        is_by_core = COMPILED and not _mode_depth()
        pays = self._is_lasting or base.numel() <= max(_WORTHWHILE * view.numel(), _SMALL)
        if is_all_of(view, base) or (pays and is_by_core):
            return self.add(base, dtype, stream_of, view)
        if pays:
            with torch.no_grad():
                self.add(base, dtype, stream_of)
            found = self.find(base, dtype, stream_of, view)
        return found

    def add(
        self, weight: Tensor, dtype: torch.dtype, stream_of: StreamOf | None = None, view: Tensor | None = None
    ) -> Tensor:
        """Cast ``weight`` (float32) to ``dtype``, same shape, and keep the result.

        With a ``view`` that has all of the weight's elements in another order, cast that, and keep the same of it.
        """
        if COMPILED and not _mode_depth():
            user = weight if view is None else view
            return COMPILED[0].add(weight, dtype, user, self._is_lasting, stream_of is not None)  # type: ignore[no-any-return]
        self._local.casts += 1
        begin(weight)
        # What the cast is of is taken first: a thread that writes meanwhile leaves an entry that is never served.
        last, state, storage = last_drop(), state_of(weight), weight.untyped_storage()
        shares = (
            view is None and not _mode_depth() and weight.requires_grad and _is_grad_enabled() and not _is_inference()
        )
        if shares:
            with torch.no_grad():
                graph = cast(weight, dtype)
        else:
            graph = cast(weight if view is None else view, dtype)
        is_linked = graph.requires_grad
        low = graph.detach() if is_linked else graph
        if view is not None:
            low = low.as_strided(weight.shape, weight.stride())
        entry = Entry(low, weight, state, storage, self.entries.home)
        entry.is_alike = low.stride() == weight.stride() and is_viewable(weight)
        if shares:
            graph, is_linked = linked(entry, weight), True
        if stream_of is not None:
            entry.readiness = Readiness(weight.device, stream_of(weight))
        self.entries.put((id(weight), dtype), entry)
        if last is not last_drop() or state != state_of(weight) or storage is not weight.untyped_storage():
            self.drop(weight, dtype)
        if is_linked or view is not None or entry.depth or not weight.requires_grad or _is_inference():
            return graph
        return entry.as_weight()

    def drop(self, weight: Tensor, dtype: torch.dtype) -> None:
        """Forget the kept cast of a weight to ``dtype``, if there is one."""
        self.entries.remove((id(weight), dtype))
        if COMPILED:
            COMPILED[0].forget([weight], False)

    def clear(self) -> None:
        """Forget the kept casts: the calling thread's, or all threads'."""
        self.entries.clear()
        if COMPILED:
            COMPILED[0].clear_mine(self._is_lasting)


def _is_ready(entry: Entry, stream: int) -> bool:
    readiness = entry.readiness
    return readiness is not None and (readiness.stream == stream or readiness.admit(entry.low, stream))


COMPILED: list[Any] = []
"""The compiled engine, where there is one: it keeps the casts that no dispatch mode sees, of all kernels.

So a region has each weight's cast but once, whichever kernels run in it: Python's do while somebody observes."""

REGION_CACHE = CastCache()
"""Lives until the calling thread's outermost region ends."""
PERSISTENT_CACHE = CastCache(is_lasting=True)
"""Outlives regions."""


# -- All threads' --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """What the calling thread did with the cast cache, and what that holds.

    Attributes:
        casts: How many casts of weights the thread has made so far.
        entries: How many are kept for its regions, and for all threads.
        recasts: How many of the casts were made after a step of an optimizer, all those of a step by one copy.
    """

    casts: int
    entries: int
    recasts: int = field(default=0, compare=False)


def cache_info() -> CacheInfo:
    """Return how many weight casts this thread has made so far and how many it keeps.

    Example:
        >>> clear_cache()
        >>> cache_info().entries
        0
    """
    caches = (REGION_CACHE, PERSISTENT_CACHE)
    for cache in caches:
        cache.entries.sweep()
    counts = [(c.own_casts, len(c.entries), c.recasts) for c in caches] + [core.info() for core in COMPILED]
    casts, entries, recasts = zip(*counts, strict=True)
    return CacheInfo(sum(casts), sum(entries), sum(recasts))


def _filled() -> list[Entries]:
    return [entries for ref in list(_live.values()) if (entries := ref())]


class _KeptByCore:
    """A cast that the compiled engine keeps, as ``KeptCast``."""

    __slots__ = ("_weight", "low")

    def __init__(self, low: Tensor, weight: Tensor) -> None:
        self.low, self._weight = low, weight

    @property
    def has_streams(self) -> bool:
        return self.low.device.index is not None

    def serves(self, tensor: Tensor) -> bool:
        return bool(COMPILED[0].serves(tensor, self.low))

    def weight(self) -> Tensor | None:
        return self._weight


class KeptCast:
    """A cast that is kept, and what it is of."""

    __slots__ = ("_entry", "_id", "low")

    def __init__(self, number: int, entry: Entry) -> None:
        self._id, self._entry = number, entry
        self.low = entry.low

    @property
    def has_streams(self) -> bool:
        """Whether the cast may still be queued on a stream."""
        return self._entry.readiness is not None

    def serves(self, tensor: Tensor) -> bool:
        """Tell whether ``find`` would return the cast for this tensor, as far as the tensor decides that."""
        return (
            self._id == id(tensor)
            and self._entry.owner is tensor.__dict__
            and self._entry.state == state_of(tensor)
            and self._entry.storage() is storage_of(tensor)
        )

    def weight(self) -> Tensor | None:
        """Return a tensor of what is now where the weight was; None where that can't be read without the weight."""
        storage, state = self._entry.storage(), self._entry.state
        if storage is None or state is None or not storage.nbytes():
            return None
        _, address, stride, shape, _ = state
        if not storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes():
            return None  # it was moved, as into memory that processes share
        offset = (address - storage.data_ptr()) // torch.float32.itemsize
        with torch.no_grad():
            return torch.empty(0, dtype=torch.float32, device=storage.device).set_(storage, offset, shape, stride)


Kept = KeptCast | _KeptByCore


def kept(*, of_all_threads: bool = True) -> Iterator[Kept]:
    """Yield the casts that are kept, of all threads or of the calling one's regions and those that outlive them."""
    own = (REGION_CACHE.entries, PERSISTENT_CACHE.entries)
    for entries in _filled() if of_all_threads else own:
        for (number, _), entry in list(entries.items()):
            if entry.state is not None and entry.version == entry.low._version:
                yield KeptCast(number, entry)
    for core in COMPILED:
        for low, weight in core.kept(of_all_threads):
            yield _KeptByCore(low, weight)


def clear_cache() -> None:
    """Drop every kept cast, of all threads.

    Needed only after a weight was written in a way that nothing shows, such as by its address, inside
    a region, or between regions with ``persistent_cache=True``.

    Example:
        >>> clear_cache()
    """
    for entries in _begin_drop():
        entries.clear()
    for core in COMPILED:
        core.clear()


def forget(tensors: Iterable[Tensor], *, for_good: bool = False) -> None:
    """Drop the kept casts, of all threads, of weights that share memory with these tensors.

    Args:
        tensors: What was written to.
        for_good: Never keep a cast of a weight there again.
    """
    caches = _begin_drop()
    if COMPILED:
        tensors = list(tensors)
        COMPILED[0].forget(tensors, for_good)
    if not caches and not for_good:
        return
    storages = _storages(tensors)
    if for_good:
        for storage in storages:
            setattr(storage, REWRITTEN, True)
    for number in {s._cdata for s in storages}:
        for entries in caches:
            entries.forget(number)


def outdate(tensors: Iterable[Tensor]) -> None:
    """Drop as ``forget`` does, except that casts that outlive regions stay in place to be made anew.

    They aren't served until then.
    """
    caches = _begin_drop()
    if COMPILED:
        tensors = list(tensors)
        COMPILED[0].outdate(tensors)
    if not caches:
        return
    own = PERSISTENT_CACHE.entries
    for number in {s._cdata for s in _storages(tensors)}:
        for entries in caches:
            if entries is own:
                entries.outdate(number)
            else:
                entries.forget(number)


def _begin_drop() -> list[Entries]:
    begin_drop()  # before entries go: a cast that was begun before isn't kept after
    return _filled()


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    return [s for s in map(storage_of, tensors) if s is not None]
