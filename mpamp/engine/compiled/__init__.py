"""The engine compiled: C++ (``csrc``) for what every call pays, over the engine in Python, which serves what is rare.

A kernel of an op is C++ on top of the one in Python; it goes on by itself in an ordinary region and outside of all, and
calls the other under dispatch modes and transforms, in backward passes, where torch's state has a mark, and for ops
with rules of their own. Each thread's scopes are mirrored, so that they can be read without Python. Which engine a
process has is settled once, when it first asks for a device.
"""

from __future__ import annotations

import functools
import itertools
import os
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...devices.state import DeviceState
from ...errors import EngineError, MpampWarning
from ...oplists import parameters_of, widening_ops
from ...plugins.backend import Backend
from ...rules.eligibility import DTYPE_OF_WEIGHTS, HELD, NEED_ONE_DTYPE, WRITTEN, is_in_place, overload_name
from ...rules.eligibility import OBSERVERS as RANGES
from ...rules.optable import OpTable
from ...rules.policy import LARGEST, RAISING, CastPolicy
from ...rules.rows import APPEND_DTYPE
from ...torch_internals import DispatchKeySet, OpOverload, dispatch_tls_set_dispatch_key_excluded
from .. import marks, scope
from ..casts import aliases, cache
from ..casts.weights import is_viewable, kind_of
from ..losses import fused
from ..observing import OBSERVERS
from . import shipped, store

__all__ = ["VARIABLE", "choice", "core", "install", "serve", "spec_of", "which"]

VARIABLE = "MPAMP_ENGINE"
CHOICES = ("auto", "python", "compiled")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Those of the regions that C++ serves, in the order of its tables' rows."""
_set_excluded = dispatch_tls_set_dispatch_key_excluded


def choice() -> str:
    """Return which engine is asked for: ``MPAMP_ENGINE``, else "auto": the compiled one where one fits.

    Raises:
        EngineError: The variable says something else.
    """
    found = os.environ.get(VARIABLE) or "auto"
    if found not in CHOICES:
        raise EngineError(f"{VARIABLE}={found!r}: it is one of {', '.join(CHOICES)}.")
    return found


@functools.cache
def core() -> Any:
    """Return the compiled engine's module, ready to be used; None where the engine in Python runs.

    Raises:
        EngineError: It was asked for, and there is none that fits, or it can't be loaded.
    """
    wanted = choice()
    if wanted == "python":
        return None
    found, why = _found()
    if found is None and wanted == "compiled":
        raise EngineError(f"{VARIABLE}=compiled, and {why}.")
    if found is not None:
        _connect(found)
    return found


def _found() -> tuple[Any | None, str]:
    """Return the module that fits this torch and where it is from, one that the user made first; or None, and why."""
    refused = []
    for origin in (store, shipped):
        try:
            found: Any = origin.load()
        except store.OthersBuildError as error:
            refused.append(str(error))
        except EngineError as error:
            refused.append(str(error))
            warnings.warn(f"a compiled engine is not used: {error}", MpampWarning, stacklevel=2)
        else:
            if found is not None:
                made = (
                    f"built in {store.directory()}" if origin is store else f"{Path(found.__file__).name} of its wheel"
                )
                return found, made
    return None, " ".join([*refused, shipped.lack()])


def which() -> tuple[str, str]:
    """Return the name of the engine that this process has, and why it is that one.

    Raises:
        EngineError: As ``core``.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = core()
    if choice() == "python":
        return "python", f"{VARIABLE}=python"
    return "python" if found is None else "compiled", _found()[1]


def _connect(found: Any) -> None:
    kinds = (torch.dtype, torch.layout, torch.memory_format)
    found.set_types(*([v for v in vars(torch).values() if isinstance(v, kind)] for kind in kinds))
    found.set_dtypes(list(_DTYPES), list(LARGEST.items()))
    key_set = DispatchKeySet.from_raw_repr
    found.set_asked(
        functools.partial(_code, found.codes), _kind, lambda each: _scope_in(found, each), is_viewable, key_set
    )
    _tell_carriers(found)
    marks.CARRIERS.on_choice.append(lambda: _tell_carriers(found))
    scope.connect(found)
    cache.COMPILED[:] = aliases.COMPILED[:] = [found]
    found.set_look_for_aliases(aliases.look)
    OBSERVERS.changed.append(lambda: found.observe(bool(OBSERVERS.all)))


def _tell_carriers(found: Any) -> None:
    keys = marks.CARRIERS.keys
    found.set_carriers([_number(key) for key in keys], keys[0] if keys else None)


def _number(key: Any) -> int:
    return int(key)  # an enumeration of C++'s, which types know nothing of


# -- Tables --------------------------------------------------------------------------------------------

_tables: weakref.WeakValueDictionary[int, OpTable] = weakref.WeakValueDictionary()
_handles: weakref.WeakKeyDictionary[OpTable, Any] = weakref.WeakKeyDictionary()
_table_numbers = itertools.count()
_Facts = tuple[str, "CastPolicy | None"]
"""An overload, and the policy that torch's own kernel under ours follows."""
_facts: list[_Facts] = []
"""What the numbers stand for that tables have rows by."""
_numbers: dict[_Facts, int] = {}


def _handle(found: Any, table: OpTable) -> Any:
    handle = _handles.get(table)
    if handle is None:
        number = next(_table_numbers)
        handle = _handles[table] = found.table(number)
        _tables[number] = table
    return handle


def _scope_in(found: Any, each: scope.Scope) -> Any:
    keep = {None: 0, cache.REGION_CACHE: 1, cache.PERSISTENT_CACHE: 2}.get(each.cache)
    if keep is None or each.rules is not each.table.rules:  # of a test, or a backward pass that is being traced
        each.core = False
    else:
        each.core = found.scope(_handle(found, each.table), keep, each.task)
    return each.core


_CODES = {
    CastPolicy.LOWER_PRECISION_FP: "lower",
    CastPolicy.FP32: "float32",
    CastPolicy.FP32_SET_OPT_DTYPE: "set_dtype",
    CastPolicy.PROMOTE: "promote",
    CastPolicy.FALLTHROUGH: "as_called",
}


def _code(codes: dict[str, int], table_id: int, dtype: int, number: int) -> int:
    """Return what a table's row says, as C++ has it; called once for each, by whatever thread first comes by."""
    table, (name, torchs) = _tables.get(table_id), _facts[number]
    if table is None:
        return codes["python"]
    policy = table.rules[_DTYPES[dtype]].get(name)
    if policy is None:
        return codes["below" if torchs is not None and name not in table else "outside"]
    if policy is CastPolicy.FP32 and name in widening_ops():
        policy = CastPolicy.FP32_SET_OPT_DTYPE
    elif policy is torchs and policy in RAISING:  # as the engine in Python: torch's kernel casts beside a float64 too
        return codes["outside"]
    return codes[_CODES.get(policy, "python")]


def _kind(cls: type) -> int:
    return {"": 1, "leaf": 2, "parameter": 3}[kind_of(cls)]


# -- Kernels -------------------------------------------------------------------------------------------


def install(
    device: DeviceState, op: OpOverload, kernel: Callable[..., Any], *, torchs: CastPolicy | None, keeps: bool
) -> Any | None:
    """Install the C++ kernel of an op over one in Python; None where the op is left to that.

    Args:
        device: The device at whose Autocast key.
        op: The overload.
        kernel: The kernel in Python.
        torchs: The policy that the kernel under it follows, if that is torch's own.
        keeps: Whether it may be given kept casts.
    """
    found, name = core(), overload_name(op)
    if found is None or _is_special(op) or fused(name, device.backend) is not None:
        return None
    facts = name, torchs
    if facts not in _numbers:
        if len(_facts) == found.max_ops:
            return None
        _numbers[facts] = len(_facts)
        _facts.append(facts)
    handle = _device(found, device, device.backend)
    if handle is None and keeps:  # whether a graph is being recorded can't be known in C++
        return None
    held = [a.name for a in op._schema.arguments if a.name in HELD and "number" in str(a.type)]
    parameters = list(parameters_of(name))
    place = handle or _bare(found, device)
    return Installed(found, found.install(name, place, _numbers[facts], keeps, held, parameters, kernel))


class Installed:
    """A C++ kernel in the dispatcher, until it is destroyed; as ``torch.library.Library``."""

    __slots__ = ("_core", "_handle")

    def __init__(self, found: Any, handle: Any) -> None:
        self._core = found
        self._handle = handle

    def _destroy(self) -> None:
        self._core.destroy(self._handle)


def _is_special(op: OpOverload) -> bool:
    name = overload_name(op)
    return (
        op.namespace != "aten"
        or is_in_place(op)
        or op._schema.name in RANGES | DTYPE_OF_WEIGHTS
        or name in NEED_ONE_DTYPE
        or name in APPEND_DTYPE
        or any(a.name in WRITTEN and a.alias_info is None for a in op._schema.arguments)
    )


@functools.lru_cache(maxsize=64)
def _device(found: Any, device: DeviceState, backend: Backend) -> Any | None:
    address = 0 if backend.capture_check() is None else backend.capture_address()
    if address is None or (address and not found.knows_handles):
        return None
    return found.device(device.index, _number(device.key), device.type, backend.stream_check() is not None, address)


def _bare(found: Any, device: DeviceState) -> Any:
    return found.device(device.index, _number(device.key), device.type, False, 0)


# -- Regions -------------------------------------------------------------------------------------------


def spec_of(device: DeviceState, dtype: torch.dtype | None, each: scope.Scope) -> Any | None:
    """Return what C++ enters an ordinary region by; None where there is no such engine, or it isn't ordinary.

    Args:
        device: The region's device.
        dtype: What lower-precision ops run in there; None where the region is disabled.
        each: Its scope.
    """
    found = core()
    if found is None or dtype not in (*_DTYPES, None) or not _scope_in(found, each):
        return None
    undo = [] if dtype else [_undo_of_disabled(device, was_off) for was_off in (False, True)]
    chosen = marks.CARRIERS
    numbers = [_number(carrier) for carrier in chosen.keys]
    carriers = list(zip(numbers, chosen.keys, chosen.names, each.mark.state, strict=False))  # none of the default mark
    place = device.type, device.key, device.index
    return found.spec(_bare(found, device), dtype or torch.float32, each, *place, carriers, undo)


@functools.cache
def _undo_of_disabled(device: DeviceState, was_off: bool) -> marks.Change:
    return _set_excluded, device.key, was_off


def serve(region: type) -> None:
    """Have regions of a class be entered and left by C++, where that can."""
    found = core()
    if found is not None:
        found.adopt(region, marks.DEFAULT_MARK, scope.MARK)
