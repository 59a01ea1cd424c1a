"""Watching every call that reaches the dispatcher, from above: before autocast, autograd and all modes.

A call is seen as it was made, then those that it is made of: ``linear``, the casts that its rule asks for, and
``addmm``. What a kernel calls below autograd is its own affair, since it may work on memory that holds nothing yet.
Calls of backward passes that begin while calls are watched are seen too, on whatever thread they run. Compiled code
runs, and is compiled, as if nobody watched. A region, autograd and the modes find what they would find without.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch

from ..devices.fallthroughs import has_kernel
from ..devices.registry import devices_in_use
from ..errors import MpampError
from ..locks import Rank, made
from ..probing import outside
from ..rules.eligibility import find_overload, overload_name
from ..torch_internals import (
    DisableTorchFunction,
    DispatchKey,
    DispatchKeySet,
    OpOverload,
    TracingContext,
    dispatch_get_all_op_names,
    dispatch_has_kernel_for_dispatch_key,
    dispatch_key_name,
    dispatch_key_parse,
    dispatch_keyset_full_after,
    dispatch_tls_is_dispatch_key_included,
    dispatch_tls_set_dispatch_key_included,
    get_dispatch_mode,
    higher_order_ops,
    maybe_current_level,
)
from ..torch_internals import TorchDispatchModeKey as ModeKey
from .compiledcode import CompiledCalls, compiled_calls_followed, is_in_compiled_code
from .resolving import resolve

__all__ = ["Around", "unwatched", "watch_calls"]

Run = Callable[[], Any]
Around = Callable[[OpOverload, "tuple[Any, ...]", "dict[str, Any]", Run], Any]
"""Given an op, its arguments and what runs it; returns the result."""

_KEY_NAME = "TESTING_ONLY_GenericMode"
"""The one key above autocast and autograd that torch gives no meaning: no tensor has it, and no mode of torch's."""
_KEY = dispatch_key_parse(_KEY_NAME)
_UNSEEN = frozenset({"aten::alias", "aten::detach", "aten::empty.memory_format", "aten::lift_fresh", "aten::to.device"})
"""What torch makes a Python object of a class from (a Parameter, a FakeTensor, a subclass): it must not have one yet.

What they are made of is seen.
"""
_BELOW = dispatch_keyset_full_after(_KEY)
_AUTOCAST = functools.reduce(
    operator.or_,
    (DispatchKeySet(key) for key in map(DispatchKey, range(64)) if dispatch_key_name(key).startswith("Autocast")),
)
_set_included = dispatch_tls_set_dispatch_key_included
_get_mode = get_dispatch_mode


class _Watcher:
    """The process's only one: autograd's threads have no other way to find it."""

    around: Around | None = None
    give_way: Callable[[], None] | None = None
    libraries: ClassVar[dict[str, torch.library.Library]] = {}
    served: ClassVar[set[str]] = set()
    lock = made(Rank.PART)


def _serve_all_ops() -> None:
    """Put a kernel at the key for every op that there is; it is never asked where the key isn't included.

    One by one: torch can't call a fallback in Python while a dispatch mode, or a tensor that has one, is about.
    """
    for name in dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        if name in _Watcher.served or namespace == "prim":
            continue
        op = find_overload(name)
        if op is not None:
            library = _Watcher.libraries.get(namespace)
            if library is None:
                library = _Watcher.libraries[namespace] = torch.library.Library(namespace, "IMPL")
            kernel = torch.library.fallthrough_kernel if name in _UNSEEN else _kernel(name, op)
            library.m.impl(rest, _KEY_NAME, kernel, name not in _UNSEEN)  # type: ignore[union-attr]
        _Watcher.served.add(name)
    for higher_order in higher_order_ops.values():  # flex_attention, cond: what they call is seen
        higher_order.fallthrough(_KEY)


@contextlib.contextmanager
def watch_calls(around: Around, give_way: Callable[[], None] | None = None) -> Iterator[CompiledCalls]:
    """Have ``around`` called in the place of every call that this thread, and its backward passes, make.

    What it calls itself is seen as well: see ``unwatched``. Gives the count of calls of compiled code, which is not
    seen into.

    Args:
        around: What is called.
        give_way: Called where another wants to watch meanwhile: it must have left this context when it returns.

    Raises:
        MpampError: Someone is watching already.

    Example:
        >>> import torch
        >>> seen = []
        >>> with watch_calls(lambda op, args, kwargs, run: (seen.append(str(op)), run())[1]):
        ...     y = torch.ones(2).softmax(0)
        >>> [op for op in seen if "softmax" in op]
        ['aten.softmax.int', 'aten._softmax.default']
    """
    if _Watcher.give_way is not None:
        _Watcher.give_way()
    with _Watcher.lock:
        if _Watcher.around is not None:
            raise MpampError("calls are being watched already: one of find_overflow and search_precision at a time.")
        _serve_all_ops()
        _Watcher.around, _Watcher.give_way = around, give_way
    compiled = CompiledCalls(_step_aside)
    try:
        with compiled_calls_followed(compiled):
            _set_included(_KEY, not is_in_compiled_code())
            yield compiled
    finally:
        _set_included(_KEY, False)
        _Watcher.around = _Watcher.give_way = None


def _step_aside() -> Callable[[], None]:
    """Have compiled code run unseen on this thread; its guards know of the key."""
    around, was_included = _Watcher.around, dispatch_tls_is_dispatch_key_included(_KEY)
    _set_included(_KEY, False)

    def come_back() -> None:
        if was_included and _Watcher.around is around:
            _set_included(_KEY, True)

    return come_back


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Run torch's ops as outside of every region, mode, transform and graph, unseen by the watcher."""
    with outside(), DisableTorchFunction(), torch.no_grad():
        yield


def _kernel(name: str, op: OpOverload) -> Callable[..., Any]:
    if op.namespace == "aten":
        return functools.partial(_call, op)

    def call(keys: Any, /, *args: Any, **kwargs: Any) -> Any:
        return _call(find_overload(name) or op, keys, *args, **kwargs)  # it may have been defined anew

    return call


def _call(op: OpOverload, keys: Any, /, *args: Any, **kwargs: Any) -> Any:
    from .python.wrapping import wrap

    around = _Watcher.around
    slots = op._schema.arguments
    is_whole = not (_is_composite(op) or _has_autocast_kernel(op, keys))

    def run() -> Any:
        tensors = ((a, s) for a, s in zip(args, slots, strict=False))
        wrapped = [wrap(a) if not isinstance(a, torch.Tensor) and str(s.type) in _TENSOR else a for a, s in tensors]
        if is_whole:
            _set_included(_KEY, False)
        try:
            result = op.redispatch(keys & _BELOW, *wrapped, **kwargs)
        finally:
            if is_whole:
                _set_included(_KEY, True)
        is_number = not isinstance(result, torch.Tensor) and [str(r.type) for r in op._schema.returns] == ["Tensor"]
        return wrap(result) if is_number else result  # an op that gives its argument back, as TorchScript's casts do

    if around is None or maybe_current_level() is not None or _is_traced():
        return run()
    return around(op, args, kwargs, run)


def _is_traced() -> bool:
    """Tell whether calls are written into a program, or made of tensors without values: backward passes are, late."""
    if TracingContext.try_get() is not None:
        return True
    return any(_get_mode(key) is not None for key in (ModeKey.PROXY, ModeKey.FUNCTIONAL, ModeKey.FAKE))


@functools.cache
def _is_composite(op: OpOverload) -> bool:
    return dispatch_has_kernel_for_dispatch_key(op.name(), DispatchKey.CompositeImplicitAutograd)


def _has_autocast_kernel(op: OpOverload, keys: Any) -> bool:
    """Tell whether a call passes a kernel that casts its arguments and then calls the op again."""
    under = keys & _AUTOCAST
    if under.raw_repr() == 0:
        return False
    key = under.highestPriorityTypeId()
    return has_kernel(op.name(), key) and not _is_for_observers(op, key)


def _is_for_observers(op: OpOverload, key: Any) -> bool:
    """Tell whether that kernel is one of an op that no table lists: what is below it runs as a whole."""
    from .python.kernels import is_native
    from .python.unlisted import is_unlisted

    name = overload_name(op)
    device = next((device for device in devices_in_use() if device.key == key), None)
    if device is None or not is_unlisted(name) or is_native(device, name):
        return False
    scope = resolve(device)
    return scope is None or name not in scope.table


_TENSOR = ("Tensor", "Optional[Tensor]")
