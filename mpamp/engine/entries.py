"""Entering and leaving: what a thread's state was is kept, and is put back in any order and after any exception.

Each change is one call of a C function with a part's name and a value. Nothing deeper is called between the
first change and the last, so that one that can't be made (no recursion is left) can't leave half of them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch

from ..errors import RegionError
from ..torch_internals import dispatch_tls_is_dispatch_key_excluded, dispatch_tls_set_dispatch_key_excluded
from .marks import Change, set_dtype
from .scope import MARK, THREAD

__all__ = ["Entry", "Restoring", "before", "enter", "leave"]

_is_excluded = dispatch_tls_is_dispatch_key_excluded
_set_excluded = dispatch_tls_set_dispatch_key_excluded
_get_dtype = torch.get_autocast_dtype
_get_cache = torch.is_autocast_cache_enabled
_set_cache = torch.set_autocast_cache_enabled

T = TypeVar("T")
Entry = list[Any]
"""Who entered, torch's cache flag before (None if it wasn't changed), and the changes that undo what was done.

An ordinary region has, instead of the changes, what they set: its key and whether that was excluded, device type and
dtype, index and scope, the mark, the first carrier's key and whether that was excluded. The compiled engine adds each
carrier's key, whether that was excluded, name and dtype, where the region has a mark of its own; of a disabled region
it has the one change.
"""
_ONE_CHANGE = 3


def before(changes: list[Change]) -> list[Change]:
    """Return the changes that undo these, in the calling thread's state as it is now."""
    scopes = THREAD.state.scopes
    return [
        (f, part, _is_excluded(part) if f is _set_excluded else _get_dtype(part) if f is set_dtype else scopes[part])
        for f, part, _ in changes
    ]


def enter(owner: T, changes: list[Change], cache: bool | None = None) -> T:
    """Make the changes, which ``leave`` undoes, and return the owner; either all of them are made or none is.

    Args:
        owner: What ``leave`` will be called with.
        changes: What to change.
        cache: What to set torch's cache flag to; None leaves it.
    """
    entries = THREAD.state.entries
    flag = None if cache is None else _get_cache()
    undo = before(changes)
    entry: Entry = [owner, flag, undo]
    try:
        entries.append(entry)
        if cache is not None:
            _set_cache(cache)
        for change, part, value in changes:
            change(part, value)
        return owner
    except BaseException:
        for change, part, value in undo:
            change(part, value)
        if flag is not None:
            _set_cache(flag)
        if entries and entries[-1] is entry:
            entries.pop()
        raise


def leave(owner: object) -> None:
    """Undo what the owner's latest ``enter`` did.

    Raises:
        RegionError: The calling thread has no such entry.
    """
    state = THREAD.state
    entries = state.entries
    entry: Entry | None = None
    try:
        entry = _written_out(entries[-1]) if entries and entries[-1][0] is owner else _take(owner, entries)
        for change, part, value in entry[2]:
            change(part, value)
        if entry[1] is not None:
            _set_cache(entry[1])
        if entries and entries[-1] is entry:
            entries.pop()
    except RegionError:
        raise
    except BaseException:
        if entry is None and entries and entries[-1][0] is owner:
            entry = _written_out(entries[-1])
        if entry is not None:
            for change, part, value in entry[2]:
                change(part, value)
            if entry[1] is not None:
                _set_cache(entry[1])
            if entries and entries[-1] is entry:
                entries.pop()
        raise
    if not entries and state.casts:
        state.casts.clear()


def _take(owner: object, entries: list[Entry]) -> Entry:
    """Take out an entry that isn't the latest; what is on now stays on.

    What it would undo is handed to the entries made since that changed the same part. Returns the entry with
    what is still its own to undo.
    """
    index = next((i for i in range(len(entries) - 1, -1, -1) if entries[i][0] is owner), None)
    if index is None:
        raise RegionError("a region was left on a thread that had not entered it; its own thread still has it open.")
    _, flag, undo = _written_out(entries[index])
    later = [_written_out(entry) for entry in entries[index + 1 :]]
    own: list[Change] = []
    heirs: list[tuple[list[Change], int, Change]] = []
    for change in undo:
        heir = next((found for e in later if (found := _find(e[2], change)) is not None), None)
        if heir is None:
            own.append(change)
        else:
            heirs.append((*heir, change))
    flag_heir = next((e for e in later if e[1] is not None), None) if flag is not None else None
    for changes, i, change in heirs:
        changes[i] = change
    if flag_heir is not None:
        flag_heir[1], flag = flag, None
    del entries[index]
    return [owner, flag, own]


def _written_out(entry: Entry) -> Entry:
    if type(entry[2]) is tuple and len(entry[2]) == _ONE_CHANGE:
        entry[2] = [entry[2]]
    elif type(entry[2]) is tuple:
        key, is_off, name, dtype, index, scope, mark, first, is_first, *carriers = entry[2]
        put = THREAD.state.put
        entry[2] = [
            (_set_excluded, key, is_off),
            *([] if any(carriers) else [(_set_excluded, first, is_first)]),
            *[(_set_excluded, k, was_off) for each in carriers for k, was_off, _, _ in each],
            *[(set_dtype, n, d) for each in carriers for _, _, n, d in each],
            (put, index, scope),
            (put, MARK, mark),
            (set_dtype, name, dtype),
        ]
    return entry


def _find(changes: list[Change], wanted: Change) -> tuple[list[Change], int] | None:
    """Return where among the changes the one of the same part is."""
    for i, (change, part, _) in enumerate(changes):
        if change == wanted[0] and part == wanted[1]:
            return changes, i
    return None


class Restoring:
    """A context in which the calling thread has a state that was kept; ``changes`` is asked for when it is entered."""

    __slots__ = ("_cache", "_changes")

    def __init__(self, changes: Callable[[], list[Change]], cache: bool | None) -> None:
        self._changes, self._cache = changes, cache

    def __enter__(self) -> Restoring:
        return enter(self, self._changes(), self._cache)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave(self)
