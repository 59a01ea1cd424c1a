"""Casts that outlive regions are made anew as soon as an optimizer has stepped, all by one multi-tensor copy.

Their memory is written into again, unless a graph still reads it: what a backward pass needs, it keeps as it was.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from ...devices.registry import device_state, is_capturing
from ...probing import probing
from ...torch_internals import (
    DisableTorchFunction,
    foreach_copy_,
    is_tracing,
    len_torch_dispatch_stack,
    peek_interpreter_stack,
    storage_use_count,
)
from .cache import COMPILED, PERSISTENT_CACHE, forget
from .entries import Entries, Entry, Key, last_drop, state_of
from .streams import Readiness
from .weights import is_weight, storage_of

if TYPE_CHECKING:
    from ...plugins.backend import Backend

__all__ = ["remake"]

Tensor = torch.Tensor
Item = tuple[Key, Tensor, Entry]
_mode_depth = len_torch_dispatch_stack
_holders = storage_use_count


def remake(weights: Iterable[Tensor]) -> None:
    """Make the casts that outlive regions anew of weights that were written: a copy for each device and dtype.

    A cast that no op has used since it was made is dropped, and so are all where they can't be made: while a graph is
    recorded or a program is traced, under dispatch modes (which would see it), in a transform, without the memory for
    it. The next use makes them.
    """
    weights = list(weights)
    if _is_watched():
        forget(weights)
        return
    with DisableTorchFunction():
        if COMPILED:
            COMPILED[0].remake(weights)
        if PERSISTENT_CACHE.entries:
            _remake_by_target(PERSISTENT_CACHE.entries, weights)


def _is_watched() -> bool:
    """Tell whether what runs here becomes part of a graph or of a program, or is seen by a dispatch mode."""
    if _mode_depth() or is_tracing() or peek_interpreter_stack() is not None:
        return True
    return is_capturing()


def _remake_by_target(entries: Entries, weights: list[Tensor]) -> None:
    by_target: dict[tuple[torch.device, torch.dtype], list[Item]] = {}
    for weight in weights:
        storage = storage_of(weight)
        for key in () if storage is None else list(entries.keys_of.get(storage._cdata, ())):
            entry = entries.get(key)
            if entry is None:
                continue
            if entry.owner is weight.__dict__ and _can_be_remade(entry, weight):
                by_target.setdefault((weight.device, key[1]), []).append((key, weight, entry))
            else:
                entries.remove(key)
    for (device, _), items in by_target.items():
        _remake(entries, device, items)


def _can_be_remade(entry: Entry, weight: Tensor) -> bool:
    low = entry.low
    return (
        entry.is_used
        and not entry.depth
        and is_weight(weight)
        and (low.shape, low.stride()) == (weight.shape, weight.stride())
        # Sharding frees memory in place, and its optimizer still lists the parameter.
        and (weight.untyped_storage().nbytes() > 0 or not low.untyped_storage().nbytes())
    )


def _remake(entries: Entries, device: torch.device, items: list[Item]) -> None:
    stream_of = _stream_check(device_state(device.type).backend)
    stream = None if stream_of is None else stream_of(items[0][1])
    last, states = last_drop(), [state_of(weight) for _, weight, _ in items]
    for _, _, entry in items:
        entry.state = None  # whatever happens from here, what is half written isn't served
    try:
        lows = _copies(items, stream)
    except RuntimeError:  # out of memory, mostly; the graphs that hold the old ones will be gone when these are needed
        for key, _, _ in items:
            entries.remove(key)
        return
    PERSISTENT_CACHE.count(len(items), len(items))
    for (_, weight, entry), low, state in zip(items, lows, states, strict=True):
        readiness = None if stream is None else Readiness(device, stream)
        entry.renew(low, readiness)
        if state == state_of(weight) and entry.storage() is storage_of(weight):
            entry.state = state
        if last is not last_drop():  # another thread has written, and has seen to the entry before or after this
            entry.state = None


def _copies(items: list[Item], stream: int | None) -> list[Tensor]:
    """Return casts of the weights as they are now.

    Raises:
        RuntimeError: There is no memory for those that need other.
    """
    with torch.inference_mode(False), torch.no_grad():
        for _, _, entry in items:
            entry.let_go()
        lows = [entry.low if _is_free(entry, stream) else torch.empty_like(entry.low) for _, _, entry in items]
        foreach_copy_(lows, [weight for _, weight, _ in items])
    return lows


@functools.cache
def _stream_check(backend: Backend) -> Callable[[Tensor], int] | None:
    return backend.stream_check()


def _is_free(entry: Entry, stream: int | None) -> bool:
    """Tell whether nobody reads the cast's memory: no graph holds it, and no other stream was given it.

    A graph holds the memory (of a linked cast, or of a view), or the tensor itself (a frozen weight's cast).
    """
    readiness = entry.readiness
    if stream is not None and (readiness is None or readiness.ready != {stream}):
        return False
    if not entry.low.untyped_storage().nbytes():  # of a device in pure Python, whose memory is elsewhere
        return False
    return _counts(entry) == _ALONE


class _Holder:
    """Holds a cast as an entry does."""

    def __init__(self) -> None:
        self.low = torch.empty(1)


def _counts(holder: Entry | _Holder) -> tuple[int, int, int]:
    """Return how many hold a cast in Python (other threads may be about to use it), in C++, and its memory."""
    low = holder.low
    storage = low.untyped_storage()
    return sys.getrefcount(low), low._use_count(), _holders(storage._cdata)  # type: ignore[attr-defined]


with probing():
    _ALONE = _counts(_Holder())
"""The counts of a cast that nothing else holds; the storage's Python object counts, too."""
