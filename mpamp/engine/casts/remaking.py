"""Casts that outlive regions are made anew as soon as an optimizer has stepped, all by one multi-tensor copy.

Their memory is written into again, unless a graph still reads it: what a backward pass needs, it keeps as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from ...devices.registry import device_state
from ...probing import probing
from .cache import COMPILED, PERSISTENT_CACHE, last_drop
from .entries import Entries, Entry, state_of
from .streams import Readiness
from .weights import is_weight, storage_of

if TYPE_CHECKING:
    from ...plugins.backend import Backend

__all__ = ["remake"]

Tensor = torch.Tensor
Item = tuple[Tensor, Entry]
_mode_depth = torch._C._len_torch_dispatch_stack
_holders = torch._C._storage_Use_Count


def remake(weights: Iterable[Tensor]) -> None:
    """Make the calling thread's lasting casts of weights that were written anew: a copy for each device and dtype.

    A cast that no op has used since it was made, and one that can't be made here (while a graph is recorded,
    under other dispatch modes, in a transform), is dropped; its next use makes it.
    """
    if COMPILED:
        weights = list(weights)
        COMPILED[0].remake(weights)
    entries = PERSISTENT_CACHE.entries
    if not entries:
        return
    by_target: dict[tuple[torch.device, torch.dtype], list[Item]] = {}
    for weight in weights:
        storage = storage_of(weight)
        ids = None if storage is None else entries.keys_of.get(storage._cdata)
        for dtype, number in list(ids.items()) if ids else ():
            entry = entries.get((number, dtype))
            if entry is None:
                continue
            if number == id(weight) and _can_be_remade(entry, weight):
                by_target.setdefault((weight.device, dtype), []).append((weight, entry))
            else:
                entries.remove((number, dtype))
    for (device, dtype), items in by_target.items():
        _remake(entries, device, dtype, items)


def _can_be_remade(entry: Entry, weight: Tensor) -> bool:
    low = entry.low
    return (
        entry.is_used
        and entry.depth == _mode_depth()
        and is_weight(weight)
        and (low.shape, low.stride()) == (weight.shape, weight.stride())
        # Sharding frees memory in place, and its optimizer still lists the parameter.
        and (weight.untyped_storage().nbytes() > 0 or not low.untyped_storage().nbytes())
    )


def _remake(entries: Entries, device: torch.device, dtype: torch.dtype, items: list[Item]) -> None:
    is_capturing, stream_of = _checks(device_state(device.type).backend)
    is_traced = torch._C._is_tracing() or torch._C._functorch.peek_interpreter_stack() is not None
    if is_traced or (is_capturing is not None and is_capturing()):
        _drop(entries, dtype, items)
        return
    stream = None if stream_of is None else stream_of(items[0][0])
    last, states = last_drop(), [state_of(weight) for weight, _ in items]
    for _, entry in items:
        entry.state = None  # whatever happens from here, what is half written isn't served
    lows = _copies(items, stream)
    if lows is None:
        _drop(entries, dtype, items)
        return
    entries.casts += len(items)
    entries.recasts += len(items)
    for (weight, entry), low, state in zip(items, lows, states, strict=True):
        readiness = None if stream is None else Readiness(device, stream)
        entry.renew(low, readiness)
        if last is last_drop() and state == state_of(weight) and entry.storage() is storage_of(weight):
            entry.state = state


def _drop(entries: Entries, dtype: torch.dtype, items: list[Item]) -> None:
    for weight, _ in items:
        entries.remove((id(weight), dtype))


def _copies(items: list[Item], stream: int | None) -> list[Tensor] | None:
    """Return casts of the weights as they are now; None where there is no memory for those that need other."""
    with torch.inference_mode(False), torch.no_grad():
        for _, entry in items:
            entry.let_go()
        try:
            lows = [entry.low if _is_free(entry, stream) else torch.empty_like(entry.low) for _, entry in items]
        except torch.OutOfMemoryError:  # the graphs that hold the old ones will be gone when these are needed
            return None
        torch._foreach_copy_(lows, [weight for weight, _ in items])
    return lows


@functools.cache
def _checks(backend: Backend) -> tuple[Callable[[], bool] | None, Callable[[Tensor], int] | None]:
    return backend.capture_check(), backend.stream_check()


def _is_free(entry: Entry, stream: int | None) -> bool:
    """Tell whether nobody reads the cast's memory: no graph holds it, and no other stream was given it.

    A graph holds the memory (of a linked cast, or of a view), or the tensor itself (a frozen weight's cast).
    """
    low, readiness = entry.low, entry.readiness
    if stream is not None and (readiness is None or readiness.ready != {stream}):
        return False
    storage = low.untyped_storage()
    if not storage.nbytes():  # of a device in pure Python, whose memory is elsewhere
        return False
    return (low._use_count(), _holders(storage._cdata)) == _ALONE  # type: ignore[attr-defined]


def _alone() -> tuple[int, int]:
    with probing():
        low = torch.empty(1)
        storage = low.untyped_storage()
        return low._use_count(), _holders(storage._cdata)  # type: ignore[attr-defined]


_ALONE = _alone()
"""The counts of a tensor and its storage that nothing else holds; the storage's Python object counts, too."""
