"""The mark: which op tables are in force, in a form that torch's own autocast state carries along.

It is the autocast state of device types that no program here uses (the carriers): torch takes it to autograd's
threads, Dynamo guards on it, and AOTAutograd has it in its cache key, so that code compiled under one table
is never served to another. Three forms, none of which a program that autocasts one such device could make:

* the default mark: the first carrier on, as it is. It counts only where a region of ours can be: on a thread
  that is in one, or in a backward pass.
* inside a compiled program, which enters ``torch.autocast``: the first carrier and another on, 16-bit dtypes.
* a region with a table of its own: dtypes among them that ``torch.autocast`` takes for none.
"""

from __future__ import annotations

import itertools
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from ..devices.keys import autocast_key
from ..devices.listeners import LISTENERS
from ..errors import MpampWarning, RegionError
from ..locks import LOCK
from ..rules.optable import OpTable
from ..torch_internals import (
    DispatchKey,
    dispatch_tls_is_dispatch_key_excluded,
    dispatch_tls_set_dispatch_key_excluded,
    reset_dynamo,
)

__all__ = [
    "DEFAULT_MARK",
    "NO_MARK",
    "CARRIERS",
    "Change",
    "Mark",
    "changes_to",
    "compose_mark",
    "forget_compiled_code",
    "make_way",
    "mark_contexts",
    "marks_in_use",
    "read_mark",
    "retire_carrier",
    "set_dtype",
]

Change = tuple[Callable[[Any, Any], Any], Any, Any]
"""A function that sets one part of a thread's state, which part, and what to."""
Tables = frozenset[tuple[str, OpTable]]
State = tuple["torch.dtype | None", ...]
"""Each carrier's autocast dtype, None where it is off."""

_is_excluded = dispatch_tls_is_dispatch_key_excluded
_set_excluded = dispatch_tls_set_dispatch_key_excluded
_get_dtype = torch.get_autocast_dtype
set_dtype = torch.set_autocast_dtype
"""torch's own, by which changes are told apart: others may stand at its name later."""


class Mark:
    """The tables of a thread's open regions; its place in torch's state is free again once nothing holds it."""

    __slots__ = ("__weakref__", "is_default", "state", "tables")

    def __init__(self, tables: Tables, state: State, *, is_default: bool = False) -> None:
        self.tables = tables
        self.state = state
        self.is_default = is_default
        """Whether it stands for no table but the devices' defaults, in an eager program or in none."""

    def table(self, device_type: str) -> OpTable | None:
        """Return the device's table, or None for its default."""
        return next((t for d, t in self.tables if d == device_type), None)


NO_MARK = Mark(frozenset(), (), is_default=True)
"""Not inside a region, as far as torch's state tells."""
DEFAULT_MARK = Mark(frozenset(), (), is_default=True)
"""Inside a region, with every device's default table."""


# -- The carriers ------------------------------------------------------------------------------------

_CANDIDATES = ("ipu", "maia", "mtia", "hpu", "xla", "mps")
_PACKAGES = {"ipu": "poptorch", "hpu": "habana_frameworks", "xla": "torch_xla"}
_COUNT = 3
_retired: set[str] = set()
_warned: list[str] = []


class Carriers:
    """The device types whose autocast state carries the mark; none where too few are left."""

    names: tuple[str, ...] = ()
    keys: tuple[DispatchKey, ...] = ()
    on_choice: ClassVar[list[Callable[[], Any]]] = []
    """Called after each choice."""

    def choose(self) -> None:
        """Take the first candidates that are neither real here nor in use."""
        found = tuple([name for name in _CANDIDATES if name not in _retired and not _is_real(name)][:_COUNT])
        self.names = found if len(found) == _COUNT else ()
        self.keys = tuple(autocast_key(f"Autocast{name.upper()}") for name in self.names)
        for tell in self.on_choice:
            tell()


def _is_real(name: str) -> bool:
    """Tell whether this machine may have such a device, by torch's own module or by its vendor's package."""
    modules: list[Any] = [getattr(place, name, None) for place in (torch, torch.backends)]
    is_available = any(m.is_available() for m in modules if hasattr(m, "is_available"))
    return is_available or _PACKAGES.get(name) in sys.modules


CARRIERS = Carriers()
CARRIERS.choose()


def retire_carrier(device_type: str) -> None:
    """Carry marks by other device types from now on: this one is somebody's device.

    Code compiled so far is compiled anew; threads that are in a region now keep the mark that they have.
    """
    with LOCK:
        if device_type not in _CANDIDATES or device_type in _retired:
            return
        _retired.add(device_type)
        is_carrier = device_type in CARRIERS.names
        if is_carrier:
            CARRIERS.choose()
    if is_carrier:
        forget_compiled_code()


# -- Encoding ----------------------------------------------------------------------------------------

_DIGITS = (torch.float16, torch.bfloat16)
_OTHERS = (
    *(torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.complex64, torch.complex128, torch.complex32),
)


def _states(digits: tuple[torch.dtype, ...]) -> list[State]:
    rest = [(None, *digits)] * (_COUNT - 1)
    return [state for state in itertools.product(digits, *rest) if any(state[1:])]


class _Numbers:
    """The states that marks of one kind have; one that is given back is used again only when all others are."""

    def __init__(self, states: list[State], on_reuse: Callable[[], object]) -> None:
        self.size = len(states)
        self.on_reuse = on_reuse
        self.unused = deque(states)
        self.returned: deque[State] = deque()
        self.marks: weakref.WeakValueDictionary[State, Mark] = weakref.WeakValueDictionary()
        self.by_tables: weakref.WeakValueDictionary[Tables, Mark] = weakref.WeakValueDictionary()

    def mark(self, tables: Tables) -> Mark | None:
        """Return the mark of these tables, or None where no state is left for it."""
        found = self.by_tables.get(tables)
        if found is not None:
            return found
        if not self.unused and self.returned:
            while self.returned:
                self.unused.append(self.returned.popleft())
            self.on_reuse()
        if not self.unused:
            return None
        state = self.unused.popleft()
        mark = self.by_tables[tables] = self.marks[state] = Mark(tables, state)
        weakref.finalize(mark, self.returned.append, state).atexit = False
        return mark


_compiled = _Numbers(_states(_DIGITS), lambda: None)  # given back only when the code that enters them was forgotten
_eager = _Numbers(
    [s for s in _states(_DIGITS + _OTHERS) if any(dtype in _OTHERS for dtype in s)],
    lambda: forget_compiled_code(),  # it may have been made for the tables that the states stood for
)
_in_programs: set[Mark] = set()
"""The marks that compiled code enters: they live as long as it may."""


def compose_mark(outer: Mark, device_type: str, table: OpTable | None, *, is_compiled: bool = False) -> Mark:
    """Return the mark of a region in ``outer``, which has one device's table replaced; None is its default.

    Raises:
        RegionError: No device type is left to carry it, or more tables are in use than can be told apart.
    """
    kept = {(d, t) for d, t in outer.tables if d != device_type}
    wanted = frozenset(kept if table is None else kept | {(device_type, table)})
    if not wanted and not is_compiled:
        return DEFAULT_MARK
    with LOCK:
        if not CARRIERS.names:
            raise RegionError(
                "no device type is left whose autocast state could tell which op table is in force "
                f"({', '.join(_CANDIDATES)} are in use): regions with tables of their own can't be told apart here."
            )
        numbers = _compiled if is_compiled else _eager
        mark = numbers.mark(wanted)
        if mark is None:
            where = "inside compiled functions" if is_compiled else "at a time"
            raise RegionError(
                f"regions with over {numbers.size} different op tables {where}: torch's state can't tell more apart. "
                "Reuse OpTable objects, or put the region around the compiled function."
            )
        if is_compiled:
            _in_programs.add(mark)
    return mark


def marks_in_use() -> list[Mark]:
    """Return the marks that stand for tables of regions' own, in an order that depends on the tables alone."""
    found = [*_compiled.marks.values(), *_eager.marks.values()]
    return sorted(found, key=lambda mark: sorted((d, t.fingerprint) for d, t in mark.tables))


def forget_compiled_code() -> None:
    """Have Dynamo compile everything anew."""
    _in_programs.clear()
    reset_dynamo()


# -- In torch's state --------------------------------------------------------------------------------


def read_mark(is_possible: bool) -> Mark:
    """Return the mark in the calling thread's autocast state.

    Args:
        is_possible: Whether the thread may be in an eager region: it has entered one, or runs a backward pass.
    """
    keys = CARRIERS.keys
    if not keys or _is_excluded(keys[0]):
        return NO_MARK
    state = tuple([None if _is_excluded(k) else _get_dtype(n) for k, n in zip(keys, CARRIERS.names, strict=True)])
    if not any(state[1:]):
        return DEFAULT_MARK if is_possible else NO_MARK
    return _eager.marks.get(state) or _compiled.marks.get(state) or NO_MARK


def make_way() -> None:
    """Leave the carriers that a program autocasts itself, where there is no mark: they are its devices."""
    for name, key in zip(CARRIERS.names, CARRIERS.keys, strict=True):
        if not _is_excluded(key):
            retire_carrier(name)


def changes_to(mark: Mark) -> list[Change]:
    """Return what puts a mark in the place of any other, in the calling thread's state."""
    keys, names = CARRIERS.keys, CARRIERS.names
    if not keys:
        if mark is not NO_MARK:
            _warn_once("no device type is left to carry op tables to autograd's threads and to compiled code")
        return []
    if mark is NO_MARK or mark is DEFAULT_MARK:
        return [(_set_excluded, key, mark is NO_MARK or key is not keys[0]) for key in keys]
    changes: list[Change] = [(_set_excluded, k, d is None) for k, d in zip(keys, mark.state, strict=True)]
    return changes + [(set_dtype, n, d) for n, d in zip(names, mark.state, strict=True) if d is not None]


def mark_contexts(mark: Mark) -> list[tuple[str, torch.dtype, bool]]:
    """Return what ``torch.autocast`` is given, a carrier each, so that a compiled program carries the mark."""
    return [(n, d or _DIGITS[0], d is not None) for n, d in zip(CARRIERS.names, mark.state, strict=True)]


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.append(message)
        warnings.warn(message + ".", MpampWarning, stacklevel=3)


LISTENERS.in_use.append(retire_carrier)
LISTENERS.rules_changed.append(forget_compiled_code)
