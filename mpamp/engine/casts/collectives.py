"""Collectives that write into a weight: torch counts none of these writes, and some go on after the call.

A weight is in flight from the call until its work is waited for, or is found to be done at the next collective or wait:
meanwhile each use casts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ...patching import Patches
from ...rules.eligibility import find_overload, overload_name
from ...torch_internals import (
    DispatchKey,
    OpOverload,
    dispatch_get_all_op_names,
    dispatch_has_kernel_for_dispatch_key,
    dispatch_keyset_full_after,
)
from ..compiling import left_out, left_out_by_itself
from .aliases import known_of

__all__ = ["watch_collectives"]

Tensor = torch.Tensor
_KEY = "ADInplaceOrView"
_READ_ONLY = {"c10d::send", "c10d::barrier", "c10d::monitored_barrier_", "c10d::check_for_nan"}
_PATCHES = Patches()
_libraries: list[torch.library.Library] = []
_in_flight: dict[int, tuple[Any, list[Any]]] = {}
"""By a work's id: the work, which goes on having that id, and the records of what it writes."""


def watch_collectives() -> None:
    """Have ``aliases`` told of what collectives write from now on; called once, at the first region."""
    if not torch.distributed.is_available():
        return
    for name in dispatch_get_all_op_names():
        is_in_place = name.startswith("c10d::") and name not in _READ_ONLY
        if is_in_place and not dispatch_has_kernel_for_dispatch_key(name, _KEY):
            op = find_overload(name)
            if op is not None:
                library = torch.library.Library(op.namespace, "IMPL")
                _libraries.append(library)
                library.impl(overload_name(op).partition("::")[2], _touching(op), _KEY, with_keyset=True)
    for name in ("wait", "synchronize", "block_current_stream"):
        if hasattr(torch.distributed.Work, name):
            _PATCHES.wrap(torch.distributed.Work, name, _landing)


def _touching(op: OpOverload) -> Callable[..., Any]:
    below = dispatch_keyset_full_after(getattr(DispatchKey, _KEY))

    def kernel(keys: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        records, result = [r for r in map(known_of, _tensors(outputs)) if r is not None], None
        try:
            result = op.redispatch(keys & below, outputs, *args, **kwargs)
        finally:
            for record in records:
                record.touch()
        _land_what_is_done()
        if records:
            _take_off(result, records)
        return result

    return left_out_by_itself(kernel)


def _landing(below: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a work's after which the stream, or the host, has what it wrote."""

    @left_out
    @functools.wraps(below)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return below(self, *args, **kwargs)
        finally:
            _land(id(self))
            _land_what_is_done()

    return wait


def _take_off(result: Any, records: list[Any]) -> None:
    boxed = result[-1] if isinstance(result, (tuple, list)) else result
    work = torch.distributed.Work.unbox(boxed) if isinstance(boxed, torch.ScriptObject) else None
    if work is not None and not work.is_completed():
        for record in records:
            record.hand_out()
        _in_flight[id(work)] = work, records


def _land(number: int) -> None:
    _, records = _in_flight.pop(number, (None, ()))
    for record in records:
        record.take_back()


def _land_what_is_done() -> None:
    for number, (work, _) in list(_in_flight.items()):
        if work.is_completed():
            _land(number)


def _tensors(value: Tensor | Iterable[Any]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for each in value:
            yield from _tensors(each)
