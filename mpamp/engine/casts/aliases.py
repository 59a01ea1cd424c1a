"""Writes into a weight's memory that the weight's own version counter doesn't show.

``weight.data`` shares the weight's memory and has a counter of its own, and so has what is given as
``weight.data =``; an array of NumPy's has none. A record of the memory tells one epoch from the next: a cast that was
made in another epoch may be of what isn't there any more. Counters that may show a write are held and read again
whenever the epoch is asked for, so that a write shows although the alias is gone; while a pointer is out each answer
is another epoch.

``handouts`` tells of aliases and pointers as they are handed out. Those of before a weight's first cast are looked for
among all tensors, where somebody else holds its memory.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from ...probing import probing
from ...torch_internals import (
    DisableTorchDispatch,
    DisableTorchFunction,
    TensorBase,
    is_tracing,
    len_torch_dispatch_stack,
    make_subclass,
    peek_interpreter_stack,
    storage_use_count,
)
from .weights import is_plain_class, is_weight, live_tensors, storage_of

__all__ = ["COMPILED", "WATCHED", "Record", "begin", "epoch_of", "known", "known_of", "look", "note", "record_of"]

Tensor = torch.Tensor
_holders = storage_use_count
_get_data, _set_data = TensorBase.data.__get__, TensorBase.data.__set__
_mode_depth = len_torch_dispatch_stack

COMPILED: list[Any] = []
"""The compiled engine, where there is one: it has the records."""
_epochs = itertools.count(1)
_MOST_NOTES = 64
_PRUNE_AT = 8


@functools.cache
def _nothing() -> Tensor:
    """Return a tensor without memory; made late, for this module may be imported where torch isn't yet."""
    with probing():
        return torch.empty(0, device="cpu")


def _alone() -> int:
    storage = torch.UntypedStorage(0, device="cpu")
    return _holders(storage._cdata) + 1


_ALONE = _alone()
"""How many hold a storage that one tensor has, its Python object included."""


class Record:
    """What may write into a storage, besides tensors that share the weight's version counter."""

    __slots__ = ("_epoch", "_notes", "_pointers", "is_complete", "is_uncounted")

    def __init__(self) -> None:
        self._epoch = 0
        self._notes: dict[int, list[Any]] = {}
        """Each a tensor without memory that has an alias's counter, and the version seen; keys are never used twice."""
        self._pointers = 0
        """How many are out."""
        self.is_uncounted = False
        """Whether somebody may write who isn't known, as long as anybody else holds the memory."""
        self.is_complete = False
        """Whether aliases that were made before the first cast have been looked for."""

    def note(self, alias: Tensor) -> None:
        """Take note of a tensor that shares the memory: its counter is read again whenever the epoch is asked for."""
        if len(self._notes) >= _PRUNE_AT:
            self._look(alias.untyped_storage(), _ALONE + 1)  # which the alias may hold
        shadow = _shadow(alias) if len(self._notes) < _MOST_NOTES else None
        if shadow is None:
            self.is_uncounted = True
        else:
            self._notes[next(_epochs)] = [shadow, shadow._version]

    def touch(self) -> None:
        """Take note of a write."""
        self._epoch = next(_epochs)

    def complete(self) -> None:
        """Take note that aliases of before the first cast have been looked for."""
        self.is_complete = True

    def hand_out(self) -> None:
        """Take note of a pointer that is handed out: until it is taken back, each answer is another epoch."""
        self._pointers += 1

    def take_back(self) -> None:
        """Take note of a pointer that is gone."""
        self._epoch = next(_epochs)
        self._pointers -= 1

    def epoch(self, storage: torch.UntypedStorage) -> int:
        """Return the epoch of the memory, now.

        Args:
            storage: The one whose record this is. Before torch 2.10 its Python object is one of those who hold the
                memory only as long as it is referred to, so it is held while they are counted.
        """
        if self._notes or self._pointers or self.is_uncounted:
            self._look(storage, _ALONE)
        return self._epoch

    def _look(self, storage: torch.UntypedStorage, alone: int) -> None:
        """See whether anybody has written.

        Who holds the memory is asked before what is written, so that the last write of one who is gone isn't missed;
        the epoch begins before the versions are taken as seen, so that no other thread misses it.
        """
        is_uncounted, notes = self.is_uncounted, list(self._notes.items())
        is_alone = _holders(storage._cdata) <= alone
        written = [(each, version) for _, each in notes if (version := each[0]._version) != each[1]]
        if written or is_uncounted or self._pointers:
            self._epoch = next(_epochs)
        for each, version in written:
            each[1] = version
        if is_alone:
            self.is_uncounted = False
            for key, _ in notes:
                self._notes.pop(key, None)
        elif len(self._notes) >= _MOST_NOTES:
            self.is_uncounted = True
            self._notes.clear()


def _shadow(alias: Tensor) -> Tensor | None:
    """Return a tensor that has an alias's version counter, but not its memory; None where there is no such tensor."""
    if not is_plain_class(type(alias)) or alias.is_inference() or is_tracing():
        return None
    if peek_interpreter_stack() is not None:
        return None
    try:
        with DisableTorchDispatch() if _mode_depth() else contextlib.nullcontext():
            shadow: Tensor = make_subclass(Tensor, alias)
            _set_data(shadow, _nothing())
    except RuntimeError:  # a device whose tensors can't be given other data
        return None
    return shadow


_RECORD = "_mpamp_record"
"""The name of a storage's record: its Python object lives as long as the memory does."""


class _CoreRecord:
    """A record that the compiled engine has, as ``Record``."""

    __slots__ = ("_core", "_handle")

    def __init__(self, core: Any, handle: Any) -> None:
        self._core, self._handle = core, handle

    def note(self, alias: Tensor) -> None:
        self._core.note_alias(self._handle, alias)

    def touch(self) -> None:
        self._core.touch(self._handle)

    def hand_out(self) -> None:
        self._core.hand_out(self._handle)

    def take_back(self) -> None:
        self._core.take_back(self._handle)

    def complete(self) -> None:
        self._core.complete(self._handle)


def known(storage: torch.UntypedStorage) -> Any | None:
    """Return the record of a storage, if it has one."""
    if COMPILED:
        handle = COMPILED[0].known_record(storage._cdata)
        return None if handle is None else _CoreRecord(COMPILED[0], handle)
    return getattr(storage, _RECORD, None)


def known_of(tensor: Tensor) -> Any | None:
    """Return the record of what a tensor lives in, if that has one."""
    with DisableTorchFunction():
        storage = storage_of(tensor)
        return None if storage is None else known(storage)


def record_of(tensor: Tensor) -> Any:
    """Return the record of what a tensor lives in; it is made if need be."""
    if COMPILED:
        return _CoreRecord(COMPILED[0], COMPILED[0].record(tensor))
    storage = tensor.untyped_storage()
    record = getattr(storage, _RECORD, None)
    if record is None:
        record = Record()
        setattr(storage, _RECORD, record)
        WATCHED[:] = [True]
    return record


WATCHED: list[bool] = []
"""Has something once a storage has a record here, where aliases are noted."""


def epoch_of(weight: Tensor) -> int:
    """Return the epoch of a weight's memory: another number once it may have been written past its counter."""
    if COMPILED:
        return COMPILED[0].epoch(weight)  # type: ignore[no-any-return]
    storage = weight.untyped_storage()
    record = getattr(storage, _RECORD, None)
    return 0 if record is None else record.epoch(storage)


def note(alias: Tensor) -> None:
    """Take note of an alias that was handed out, if what it lives in has a record here."""
    if issubclass(type(alias), Tensor):
        with DisableTorchFunction():
            storage = storage_of(alias)
            record = None if storage is None else getattr(storage, _RECORD, None)
            if record is not None:
                record.note(alias)


# -- Aliases of before the first cast -------------------------------------------------------------------


def begin(weight: Tensor) -> None:
    """Have a weight's memory have a record before a cast is made of it."""
    if COMPILED:  # which does so itself for the casts that it makes
        COMPILED[0].begin(weight)
        return
    record = record_of(weight)
    if not record.is_complete:
        record.is_complete = True
        if _is_shared(weight):
            record.hand_out()  # for good
        look(weight)


def _is_shared(weight: Tensor) -> bool:
    """Tell whether other processes have a weight's memory, too; storages elsewhere than in the host's say so of all."""
    return weight.is_cpu and weight.untyped_storage().is_shared()


_waits = [0, 0]
"""How many weights are still to be passed over, and how many were the last time: twice as many after a vain search."""


def look(weight: Tensor, own: int = 0) -> None:
    """Look for tensors that share a weight's memory, if somebody else holds it, and take note of them.

    All memory that weights share with others is dealt with at once, for a search goes through all that Python has.

    Args:
        weight: What is about to be cast.
        own: How many of those who hold the memory are ours.
    """
    storage = storage_of(weight)
    if storage is None or _holders(storage._cdata) <= _ALONE + own:
        return
    if _waits[0]:
        _waits[0] -= 1
        return
    with DisableTorchFunction():
        is_found = False
        for shared in _shared():
            record = record_of(shared[0])
            record.complete()
            for tensor in shared:
                record.note(tensor)
            is_found |= any(tensor is weight for tensor in shared)
    _waits[0] = _waits[1] = 0 if is_found else 2 * _waits[1] + 1


def _shared() -> Iterator[list[Tensor]]:
    """Yield the float32 tensors that live in the same storage, for each that a weight and others live in."""
    found: dict[int, list[Tensor]] = {}
    for value in live_tensors():
        if is_plain_class(type(value)) and value.dtype is torch.float32:
            storage = storage_of(value)
            if storage is not None and storage.nbytes():
                found.setdefault(storage._cdata, []).append(value)
    return (tensors for tensors in found.values() if len(tensors) > 1 and any(map(is_weight, tensors)))
