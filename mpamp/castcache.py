"""A weight's cast, kept until the weight changes or goes away.

Only float32 weights are kept: any ``nn.Parameter``, frozen or not, and any leaf that requires grad. An
entry holds the low-precision *data* and no autograd graph, for a graph would keep the weight alive; the
cast that is linked to the weight's gradient is held weakly, and linked anew where it is gone.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

__all__ = ["CacheInfo", "CastCache", "cache_info", "clear_cache", "is_weight"]

Tensor = torch.Tensor
_float32 = torch.float32
_is_grad_enabled = torch.is_grad_enabled

_live: list[weakref.ref[_Entries]] = []
_live_lock = threading.Lock()
_KINDS: dict[type, str] = {torch.Tensor: "leaf", torch.nn.Parameter: "parameter"}


def _kind(cls: type) -> str:
    """Say which tensors of a class are weights: all ("parameter"), leaves ("leaf"), or none ("")."""
    has_own_dispatch = cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]
    is_lazy = issubclass(cls, UninitializedTensorMixin)
    found = "parameter" if issubclass(cls, torch.nn.Parameter) and not has_own_dispatch and not is_lazy else ""
    _KINDS[cls] = found
    return found


def is_weight(tensor: Tensor) -> bool:
    """Tell whether the cache keeps casts of this tensor.

    Example:
        >>> is_weight(torch.nn.Parameter(torch.ones(2), requires_grad=False)), is_weight(torch.ones(2))
        (True, False)
    """
    cls = type(tensor)
    kind = _KINDS[cls] if cls in _KINDS else _kind(cls)
    if kind == "leaf":
        if not (tensor.requires_grad and tensor.is_leaf):
            return False
    elif not kind:
        return False
    return tensor.dtype is _float32 and tensor.layout is torch.strided and not tensor.is_inference()


class _Linked(torch.autograd.Function):
    """Gives kept low-precision data the gradient of the weight that it was cast from."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, low: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return low.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


class _Entry:
    """One cast, and what must still be true of the weight for it to count."""

    __slots__ = ("graph", "is_inference", "low", "state", "storage", "weight")

    def __init__(self, weight: Tensor, low: Tensor, ref: weakref.ref[Tensor]) -> None:
        self.low, self.weight, self.is_inference = low, ref, low.is_inference()
        self.graph: weakref.ref[Tensor] | None = None
        self.state = (weight._version, weight.data_ptr(), weight.stride(), weight.numel())
        # A storage's Python object lives as long as the storage: other memory at the same address isn't taken for it.
        self.storage = weakref.ref(weight.untyped_storage())


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """Casts of weights that this thread's caches made, and entries that they hold now."""

    casts: int
    entries: int


class _Entries(dict[tuple[int, torch.dtype], _Entry]):
    """One thread's entries; other threads may drop some, but add none."""

    __slots__ = ("__weakref__",)


class CastCache(threading.local):
    """Kept casts, apart for each thread: a cast queued on one thread's stream isn't ready on another's."""

    def __init__(self) -> None:
        self.entries = _Entries()
        self.casts = 0
        with _live_lock:
            _live.append(weakref.ref(self.entries, _live.remove))

    def find(self, tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the kept cast of a weight to ``dtype``, linked to its gradient where one is needed, or None."""
        entry = self.entries.get((id(tensor), dtype))
        if (
            entry is None
            or entry.state != (tensor._version, tensor.data_ptr(), tensor.stride(), tensor.numel())
            or entry.storage() is not tensor.untyped_storage()
        ):
            return None
        if not _is_grad_enabled():
            return entry.low
        if entry.is_inference:
            return None  # can't be saved for a backward pass
        return _link(entry, tensor) if tensor.requires_grad else entry.low

    def add(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Cast ``weight`` (float32) to ``dtype``, same shape, and keep the result."""
        self.casts += 1
        entries, key = self.entries, (id(weight), dtype)
        ref = weakref.ref(weight, lambda _: entries.pop(key, None))
        if weight.requires_grad and _is_grad_enabled():
            graph = weight.to(dtype)
            entries[key] = entry = _Entry(weight, graph.detach(), ref)
            entry.graph = weakref.ref(graph)
            return graph
        low = weight.to(dtype)  # makes no graph: the weight is frozen, or grad mode is off
        entries[key] = _Entry(weight, low, ref)
        return low

    def drop(self, weight: Tensor, dtype: torch.dtype) -> None:
        """Forget the kept cast of a weight to ``dtype``, if there is one."""
        self.entries.pop((id(weight), dtype), None)


def _link(entry: _Entry, weight: Tensor) -> Tensor:
    graph = None if entry.graph is None else entry.graph()
    if graph is None:
        graph = _Linked.apply(weight, entry.low)  # type: ignore[no-untyped-call]
        entry.graph = weakref.ref(graph)
    else:
        graph._fix_weakref()  # type: ignore[attr-defined]  # its Python object may belong to C++ by now
    return graph


REGION_CACHE = CastCache()
"""Lives until the calling thread's outermost region ends."""
PERSISTENT_CACHE = CastCache()
"""Outlives the calling thread's regions."""


def clear_cache() -> None:
    """Drop every kept cast, of all threads.

    Needed only after a weight was written through an alias that torch doesn't track, such as
    ``p.data.copy_(x)`` inside a region, or between regions with ``persistent_cache=True``.

    Example:
        >>> clear_cache()
    """
    for entries in _filled():
        entries.clear()


def cache_info() -> CacheInfo:
    """Return how many weight casts this thread has made so far and how many it keeps.

    Example:
        >>> clear_cache()
        >>> cache_info().entries
        0
    """
    caches = (REGION_CACHE, PERSISTENT_CACHE)
    return CacheInfo(sum(c.casts for c in caches), sum(len(c.entries) for c in caches))


def _filled() -> list[_Entries]:
    with _live_lock:
        found = [ref() for ref in _live]
    return [entries for entries in found if entries]


def _drop_updated(entries: _Entries, stepped: set[int]) -> None:
    """Drop the entries that an optimizer step may have made stale.

    Those are the step's own parameters, and every trainable weight: a flat or sharded parameter's
    step changes weights that the optimizer has never seen.
    """
    for key, entry in list(entries.items()):
        weight = entry.weight()
        if weight is None or weight.requires_grad or key[0] in stepped:
            entries.pop(key, None)


def _after_optimizer_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    # Fused optimizers write into parameters without raising their _version.
    filled = _filled()
    if filled:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for entries in filled:
            _drop_updated(entries, stepped)


def watch_optimizers() -> None:
    """Have every optimizer's step drop the casts that it makes stale; called once, at the first region."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(_after_optimizer_step)
