"""What hands a tensor's memory out past its version counter: replaced in torch, to tell ``aliases`` of it.

``torch.Tensor.data`` and the like stay what they were where the class is asked for them; a tensor is given ours.
Storages are written into by methods of their own, which raise no counter either.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...patching import Patches
from ...torch_internals import GET_DATA_ATTR, DisableTorchFunction
from ..compiling import left_out, left_out_by_itself
from .aliases import COMPILED, WATCHED, known, known_of, note, record_of
from .weights import kind_of, storage_of

__all__ = ["watch_handouts"]

Tensor = torch.Tensor
_PATCHES = Patches()


def watch_handouts() -> None:
    """Have ``aliases`` told of what is handed out from now on; called once, at the first region."""
    wrap = _PATCHES.wrap
    wrap(Tensor, "data", _data)
    wrap(*GET_DATA_ATTR, _data_in_graphs)
    wrap(Tensor, "set_", lambda below: _Method(below, _set))
    wrap(Tensor, "numpy", lambda below: _Method(below, _numpy))
    wrap(Tensor, "__dlpack__", lambda below: _Method(below, _capsule))
    wrap(Tensor, "__cuda_array_interface__", _Interface)
    for owner in (torch, torch.utils.dlpack):
        wrap(owner, "to_dlpack", lambda below: functools.wraps(below)(functools.partial(_capsule, below)))
    for name in ("fill_", "copy_", "__setitem__", "byteswap", "_set_from_file"):
        wrap(torch.UntypedStorage, name, _writing)
    for name in ("_share_fd_cpu_", "_share_filename_cpu_"):
        wrap(torch.UntypedStorage, name, _sharing)


# -- Tensors with a counter of their own ----------------------------------------------------------------


class _Data:
    """``tensor.data``: what it gives has a counter of its own, and what is put there keeps the one that it has."""

    def __init__(self, below: Any) -> None:
        self._below, self._get, self._set = below, below.__get__, below.__set__

    @left_out
    def __get__(self, tensor: Tensor | None, owner: Any = None) -> Any:
        if tensor is None:
            return self._below
        alias = self._get(tensor)
        if WATCHED:
            note(alias)
        return alias

    @left_out
    def __set__(self, tensor: Tensor, given: Tensor) -> None:
        _settle(given)
        self._set(tensor, given)
        _note_both(tensor, given)

    def __delete__(self, tensor: Tensor) -> None:
        self._below.__delete__(tensor)


def _data(below: Any) -> Any:
    attribute = _Data(below)
    return COMPILED[0].data_attribute(below, attribute.__set__) if COMPILED else attribute


def _data_in_graphs(below: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What Dynamo writes into a graph for ``tensor.data``; a backend may run the graph as it is."""

    @left_out_by_itself
    @functools.wraps(below)
    def _get_data_attr(tensor: Tensor) -> Tensor:
        alias = below(tensor)
        if COMPILED:
            COMPILED[0].note(alias)
        elif WATCHED:
            note(alias)
        return alias

    return _get_data_attr


class _Method:
    """A method: the class has what was there, tensors have a function that is given that first."""

    def __init__(self, below: Any, function: Callable[..., Any]) -> None:
        self._below, self._function = below, functools.wraps(below)(functools.partial(function, below))

    def __get__(self, tensor: Tensor | None, owner: Any = None) -> Any:
        return self._below if tensor is None else types.MethodType(self._function, tensor)


@left_out
def _set(below: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    source = args[0] if args and isinstance(args[0], Tensor) else None
    if source is not None:
        _settle(source)
    result = below(tensor, *args, **kwargs)
    _note_both(tensor, tensor if source is None else source)
    return result


def _settle(tensor: Tensor) -> None:
    """Have the notes on a tensor's memory be of what holds it now."""
    if COMPILED or not isinstance(tensor, Tensor):
        return  # the compiled engine knows its counters apart
    with DisableTorchFunction():
        storage = storage_of(tensor)
        record = None if storage is None else known(storage)
    if record is not None:
        record.epoch(storage)


def _note_both(tensor: Tensor, given: Tensor) -> None:
    """Take note of two tensors that live in the same memory by now, each with a counter of its own."""
    with DisableTorchFunction():
        record = record_of(tensor) if _may_be_weight(tensor) else known_of(tensor)
        if record is not None:
            for each in (tensor, given):
                record.note(each)


def _may_be_weight(tensor: Tensor) -> bool:
    return (
        tensor.dtype is torch.float32
        and storage_of(tensor) is not None
        and (tensor.requires_grad or kind_of(type(tensor)) == "parameter")
    )


# -- Pointers -------------------------------------------------------------------------------------------


def _hand_out(tensor: Tensor, holder: Any) -> None:
    """Take note of a pointer to a tensor's memory that is out as long as ``holder`` lives; for good if that is None."""
    with DisableTorchFunction():
        if tensor.dtype is not torch.float32 or storage_of(tensor) is None:
            return
        record = record_of(tensor)
        storage = tensor.untyped_storage()
    record.hand_out()
    if holder is not None:
        weakref.finalize(holder, _take_back, record, storage).atexit = False


def _take_back(record: Any, _: torch.UntypedStorage) -> None:
    """Take note of a pointer that is gone.

    The storage's Python object is held until now: before torch 2.10 the garbage collector takes the record from one
    that is in a cycle, though the memory lives on.
    """
    record.take_back()


@left_out
def _numpy(below: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    array = below(tensor, *args, **kwargs)
    _hand_out(tensor, array)
    return array


@left_out
def _capsule(below: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.requires_grad:
        return below(tensor, *args, **kwargs)
    alias = tensor.data  # lives as long as the capsule and what is made of it
    _hand_out(tensor, alias)
    return below(alias, *args, **kwargs)


class _Interface:
    """``tensor.__cuda_array_interface__``: who has it holds the tensor."""

    def __init__(self, below: Any) -> None:
        self._below = below

    def __get__(self, tensor: Tensor | None, owner: Any = None) -> Any:
        if tensor is None:
            return self._below
        found = self._below.__get__(tensor, owner)
        # A weight isn't referred to weakly: torch.utils.swap_tensors would refuse it.
        _hand_out(tensor, None if kind_of(type(tensor)) == "parameter" else tensor)
        return found


# -- Writes ---------------------------------------------------------------------------------------------


def _writing(below: Callable[..., Any]) -> Callable[..., Any]:
    @left_out
    @functools.wraps(below)
    def write(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        try:
            return below(self, *args, **kwargs)
        finally:
            record = known(self)
            if record is not None:
                record.touch()

    return write


def _sharing(below: Callable[..., Any]) -> Callable[..., Any]:
    @left_out
    @functools.wraps(below)
    def share(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        record = known(self)
        if record is not None:
            record.hand_out()  # to other processes, for good
        return below(self, *args, **kwargs)

    return share
