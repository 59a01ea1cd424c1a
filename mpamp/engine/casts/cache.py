"""A weight's cast, kept until the weight changes or goes away.

Only float32 weights are kept: any ``nn.Parameter``, frozen or not, and any leaf that requires grad. An
entry holds the low-precision *data* and no autograd graph, for a graph would keep the weight alive; the
cast that is linked to the weight's gradient is held weakly, and linked anew where it is gone.

Nothing refers to the weight itself, not even weakly: ``torch.utils.swap_tensors`` would refuse it then. What
an entry hangs on is the weight's storage. Writes that raise no version counter are told of by ``writes``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from .entries import Entries, Entry, state_of
from .streams import Readiness

__all__ = ["CacheInfo", "CastCache", "cache_info", "clear_cache", "forget", "is_weight", "storage_of"]

Tensor = torch.Tensor
StreamOf = Callable[[Tensor], int]
_float32 = torch.float32
_is_grad_enabled = torch.is_grad_enabled
_mode_depth = torch._C._len_torch_dispatch_stack

_KINDS: dict[type, str] = {torch.Tensor: "leaf", torch.nn.Parameter: "parameter"}


# -- What is a weight ----------------------------------------------------------------------------------


def _kind(cls: type) -> str:
    """Say which tensors of a class are weights: all ("parameter"), leaves ("leaf"), or none ("")."""
    has_own_dispatch = cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]
    is_lazy = issubclass(cls, UninitializedTensorMixin)
    found = "parameter" if issubclass(cls, torch.nn.Parameter) and not has_own_dispatch and not is_lazy else ""
    _KINDS[cls] = found
    return found


def is_weight(tensor: Tensor) -> bool:
    """Tell whether the cache keeps casts of this tensor.

    A tensor in a part of a larger storage is none: whoever owns the whole writes into it without raising the
    tensor's version counter, such as flat parameters and ``vector_to_parameters``. Nor is one whose counter was
    once set back after a write, as FSDP2 does with the parameters that it gathers.

    Example:
        >>> is_weight(torch.nn.Parameter(torch.ones(2), requires_grad=False)), is_weight(torch.ones(2))
        (True, False)
        >>> is_weight(torch.nn.Parameter(torch.ones(4)[:2]))
        False
    """
    cls = type(tensor)
    kind = _KINDS[cls] if cls in _KINDS else _kind(cls)
    if kind == "leaf":
        if not (tensor.requires_grad and tensor.is_leaf):
            return False
    elif not kind:
        return False
    if tensor.dtype is not _float32 or tensor.layout is not torch.strided or tensor.is_inference():
        return False
    storage = tensor.untyped_storage()
    # Of a device in pure Python the memory is elsewhere: its storages are empty.
    return storage.nbytes() in (0, 4 * tensor.numel()) and not hasattr(storage, _REWRITTEN)


_REWRITTEN = "_mpamp_is_rewritten"


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return what a tensor lives in; None for layouts and classes that have no storage of their own."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


# -- The cache -----------------------------------------------------------------------------------------


_live: dict[int, weakref.ref[Entries]] = {}
"""The entries of every thread's caches."""


class _Local(threading.local):
    def __init__(self) -> None:
        self.entries = Entries(_live)
        self.casts = 0


class CastCache:
    """Kept casts, apart for each thread."""

    def __init__(self) -> None:
        self._local = _Local()

    @property
    def entries(self) -> Entries:
        """The calling thread's entries."""
        return self._local.entries

    @property
    def casts(self) -> int:
        """How many casts the calling thread has made here."""
        return self._local.casts

    def find(self, tensor: Tensor, dtype: torch.dtype, stream_of: StreamOf | None = None) -> Tensor | None:
        """Return the kept cast of a weight to ``dtype``, linked to its gradient where one is needed, or None.

        ``stream_of`` numbers the stream that the tensor's device queues work on now; None if there is but one.
        """
        entry = self._local.entries.get((id(tensor), dtype))
        if (
            entry is None
            or entry.state != (tensor._version, tensor.data_ptr(), tensor.stride(), tensor.shape)
            or entry.storage() is not tensor.untyped_storage()
            or entry.version != entry.low._version
        ):
            return None
        if stream_of is not None and not _is_ready(entry, stream_of(tensor)):
            return None
        if entry.depth or _mode_depth():
            return _guarded(entry, tensor)
        if _is_grad_enabled() and tensor.requires_grad:
            return _link(entry, tensor)
        return entry.low

    def add(self, weight: Tensor, dtype: torch.dtype, stream_of: StreamOf | None = None) -> Tensor:
        """Cast ``weight`` (float32) to ``dtype``, same shape, and keep the result."""
        self._local.casts += 1
        # What the cast is of is taken first: a thread that writes meanwhile leaves an entry that is never served.
        last, state, storage = _last_drop[0], state_of(weight), weight.untyped_storage()
        graph = _cast(weight, dtype)
        is_linked = graph.requires_grad
        entry = Entry(graph.detach() if is_linked else graph, state, storage, self.entries.home)
        if is_linked and not entry.depth:
            entry.graph = weakref.ref(graph)
        if stream_of is not None:
            entry.readiness = Readiness(weight.device, stream_of(weight))
        self.entries.put((id(weight), dtype), entry)
        if last is not _last_drop[0] or state != state_of(weight) or storage is not weight.untyped_storage():
            self.drop(weight, dtype)
        return graph

    def drop(self, weight: Tensor, dtype: torch.dtype) -> None:
        """Forget the kept cast of a weight to ``dtype``, if there is one."""
        self.entries.remove((id(weight), dtype))

    def clear(self) -> None:
        """Forget the calling thread's kept casts."""
        self.entries.clear()


def _is_ready(entry: Entry, stream: int) -> bool:
    readiness = entry.readiness
    return readiness is not None and (readiness.stream == stream or readiness.admit(entry.low, stream))


def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    if not torch.is_inference_mode_enabled():
        return weight.to(dtype)
    with torch.inference_mode(False), torch.no_grad():  # so that a later backward pass can save it
        return weight.to(dtype)


class _Linked(torch.autograd.Function):
    """Gives kept low-precision data the gradient of the weight that it was cast from."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, low: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return low.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


def _guarded(entry: Entry, weight: Tensor) -> Tensor | None:
    """Return a kept cast where dispatch modes see it, or saw it being made: they get aliases of their own."""
    if _mode_depth() < entry.depth:
        return None
    if _is_grad_enabled() and weight.requires_grad:
        return _Linked.apply(weight, entry.low)  # type: ignore[no-any-return,no-untyped-call]
    return entry.low.detach()


def _link(entry: Entry, weight: Tensor) -> Tensor:
    graph = None if entry.graph is None else entry.graph()
    if graph is None:
        graph = _Linked.apply(weight, entry.low)  # type: ignore[no-untyped-call]
        entry.graph = weakref.ref(graph)
    else:
        graph._fix_weakref()  # type: ignore[attr-defined]  # its Python object may belong to C++ by now
    return graph


_last_drop = [object()]
"""Stands for the last time that entries were dropped for a reason that no version counter shows."""

REGION_CACHE = CastCache()
"""Lives until the calling thread's outermost region ends."""
PERSISTENT_CACHE = CastCache()
"""Outlives the calling thread's regions."""


# -- All threads' --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """Casts of weights that this thread's caches made, and entries that they hold now."""

    casts: int
    entries: int


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
    return CacheInfo(sum(c.casts for c in caches), sum(len(c.entries) for c in caches))


def _filled() -> list[Entries]:
    return [entries for ref in list(_live.values()) if (entries := ref())]


def clear_cache() -> None:
    """Drop every kept cast, of all threads.

    Needed only after a weight was written in a way that torch doesn't track, such as ``p.data.copy_(x)``, inside
    a region, or between regions with ``persistent_cache=True``.

    Example:
        >>> clear_cache()
    """
    _last_drop[0] = object()
    for entries in _filled():
        entries.clear()


def forget(tensors: Iterable[Tensor], *, for_good: bool = False) -> None:
    """Drop the kept casts, of all threads, of weights that share memory with these tensors.

    Args:
        tensors: What was written to.
        for_good: Never keep a cast of a weight there again.
    """
    _last_drop[0] = object()  # before entries go: a cast that was begun before isn't kept after
    caches = _filled()
    if not caches and not for_good:
        return
    storages = [s for s in map(storage_of, tensors) if s is not None]
    if for_good:
        for storage in storages:
            setattr(storage, _REWRITTEN, True)
    for number in {s._cdata for s in storages}:
        for entries in caches:
            entries.forget(number)
