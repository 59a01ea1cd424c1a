"""One module's rule, and the regions that it means where the module is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..devices.registry import devices_in_use
from ..devices.state import DeviceState
from ..engine.casts.cache import PERSISTENT_CACHE
from ..engine.compiling import (
    Contexts,
    is_dynamo_compiling,
    left_out_by_itself,
    run_while_tracing,
    stepped_over,
    traced,
)
from ..engine.resolving import resolve
from ..engine.scope import THREAD, Scope, graph_task, mode_depth
from ..regions.programs import contexts_of, surrounding
from ..regions.region import Region, autocast
from ..rules.optable import ANY_DEVICE, OpTable
from ..torch_internals import register_constant
from .containers import map_tensors

__all__ = ["SOURCE", "ModuleRule", "run_by"]

SOURCE = "module"
"""Who decides the rows that a rule of ops puts on top of a region's table."""
_16_BITS = (torch.bfloat16, torch.float16)


@dataclass(unsafe_hash=True, slots=True)  # never changed; torch 2.8's Dynamo takes no frozen one
class ModuleRule:
    """What a module's forward runs in: a dtype, or rules of ops on top of the region's; without either, no autocast."""

    dtype: torch.dtype | None = None
    ops: OpTable | None = None

    def __str__(self) -> str:
        if self.dtype is not None:
            return "fp32" if self.dtype is torch.float32 else str(self.dtype).removeprefix("torch.")
        return "False" if self.ops is None else "{" + ", ".join(f"{op}: {row}" for op, row in self.ops.items()) + "}"


register_constant(ModuleRule)


@dataclass(frozen=True, slots=True)
class _Inside:
    """What ops of one device run in inside of a module: ``dtype`` None is without autocast."""

    dtype: torch.dtype | None
    table: OpTable | None
    """None is the device's default."""


def _inside(rule: ModuleRule, device: DeviceState, scope: Scope) -> _Inside | None:
    """Return what a rule makes of the region around the call; None where it has nothing to say of it."""
    table, dtype = surrounding(scope.table, torch.get_autocast_dtype(device.type))
    if rule.ops is None:
        return _Inside(rule.dtype, None if table is device.table else table)
    if not torch.is_autocast_enabled(device.type) or rule.ops.device not in (ANY_DEVICE, device.type):
        return None
    return _Inside(dtype, table.override(rule.ops, source=SOURCE))


def _scopes(types: tuple[str, ...] = ()) -> list[tuple[DeviceState, Scope]]:
    """Return the regions of mpamp's around the call.

    In a program a mark speaks for every device, whether a region is around for it or not: what counts are those that
    autocast is on for, and of the others those of ``types``.
    """
    state, is_resolved = THREAD.state, graph_task() == -1 and not mode_depth() and not torch.is_autocast_cache_enabled()
    found: list[tuple[DeviceState, Scope]] = []
    for device in devices_in_use():
        scope: Scope | None = state.scopes[device.index]
        if scope is None or scope.task != -1 or not is_resolved:  # as kernels do
            is_entered, scope = scope is not None, resolve(device)
            if not (is_entered or torch.is_autocast_enabled(device.type) or device.type in types):
                continue
        if scope is not None:
            found.append((device, scope))
    return found


# -- In eager code -------------------------------------------------------------------------------------

_known: dict[Any, Region | None] = {}
_MOST_KNOWN = 256


@left_out_by_itself
def _prepared(rule: ModuleRule, args: Any, kwargs: Any) -> tuple[tuple[Region, ...], Any, Any]:
    """Return the regions to call a module in, and its arguments for that."""
    found = tuple([region for device, scope in _scopes() if (region := _region(rule, device, scope)) is not None])
    return found, *_arguments(rule, tuple([region.device_type for region in found]), args, kwargs)


def _region(rule: ModuleRule, device: DeviceState, scope: Scope) -> Region | None:
    name = device.type
    is_on = torch.is_autocast_enabled(name)
    key = (rule, name, device.version, scope.table, torch.get_autocast_dtype(name), is_on, scope.cache)
    if key not in _known:
        inside = _inside(rule, device, scope)
        while len(_known) >= _MOST_KNOWN:
            _known.pop(next(iter(_known)), None)
        _known[key] = None if inside is None else _made(device, scope, inside)
        return _known[key]
    return _known[key]


def _made(device: DeviceState, scope: Scope, inside: _Inside) -> Region:
    if inside.dtype is None:
        return autocast(device.type, enabled=False)
    is_kept, is_persistent = scope.cache is not None, scope.cache is PERSISTENT_CACHE
    return autocast(device.type, inside.dtype, True, is_kept, ops=inside.table, persistent_cache=is_persistent)


# -- In programs that Dynamo makes ---------------------------------------------------------------------


@run_while_tracing
def _contexts(rule: ModuleRule, types: tuple[str, ...]) -> tuple[Contexts, ...]:
    """Return what carries the same regions through a program, for a call with tensors of these device types."""
    found = [(device, _inside(rule, device, scope)) for device, scope in _scopes(types)]
    return tuple([_written(device, inside) for device, inside in found if inside is not None])


def _written(device: DeviceState, inside: _Inside) -> Contexts:
    if inside.dtype is None:
        return ((device.type, device.backend.default_dtype, False),)
    return contexts_of(device, inside.table, inside.dtype)


# -- A call --------------------------------------------------------------------------------------------


@stepped_over
def run_by(rule: ModuleRule, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a module's forward by a rule; outside of mpamp's regions as if there were none."""
    if not is_dynamo_compiling():
        regions, args, kwargs = _prepared(rule, args, kwargs)
        return _run_in(regions, function, args, kwargs)
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    contexts = _contexts(rule, tuple(dict.fromkeys([t.device.type for t in tensors])))
    args, kwargs = _arguments(rule, tuple([c[-1][0] for c in contexts]), args, kwargs)
    return _run_in(tuple([traced(c) for c in contexts]), function, args, kwargs)


def _arguments(rule: ModuleRule, types: tuple[str, ...], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments for a float32 module: what came in 16 bits, on devices of these types, is float32."""
    if rule.dtype is not torch.float32 or not types:
        return args, kwargs
    if not kwargs and all(isinstance(a, torch.Tensor) and a.dtype not in _16_BITS for a in args):
        return args, kwargs  # mostly so, and looking into containers costs more than the region
    return map_tensors(  # type: ignore[no-any-return]
        (args, kwargs), torch.Tensor.float, lambda t: t.dtype in _16_BITS and t.device.type in types
    )


@stepped_over
def _run_in(regions: tuple[Any, ...], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if not regions:
        return function(*args, **kwargs)
    with regions[0]:
        return _run_in(regions[1:], function, args, kwargs)
