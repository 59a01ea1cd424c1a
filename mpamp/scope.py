"""Which op table is in force for a call: the part of a region's state that torch has no place for.

Inside a region of the calling thread that is the thread's ``Scope``. Elsewhere it is found again:

* in a backward pass (recompute of activation checkpointing, any thread), by the region in which the
  autograd node that is running was made;
* in a compiled or exported program and in autograd's own threads, by a *mark* in torch's autocast state.

The mark is the autocast state of device types that no program uses at the same time (``CARRIERS``). Torch
carries it along, Dynamo guards on it, and AOTAutograd puts it into its cache key, so that one table's
graph is never served to another.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
import torch.fx.traceback as fx_traceback
from torch._C import DispatchKey

from .castcache import REGION_CACHE, CastCache
from .errors import OpTableError, RegionError
from .optable import OpTable
from .policy import CastPolicy

if TYPE_CHECKING:
    from .registry import DeviceState

__all__ = [
    "DEFAULT_MARK",
    "NO_MARK",
    "THREAD",
    "Scope",
    "compose_mark",
    "mark_contexts",
    "read_mark",
    "resolve",
    "write_mark",
]

NO_MARK = -1
"""Not inside a region, as far as torch's state tells."""
DEFAULT_MARK = 0
"""Inside a region, with every device's default table."""

graph_task = torch._C._current_graph_task_id
mode_depth = torch._C._len_torch_dispatch_stack
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded
_get_dtype = torch.get_autocast_dtype
_set_dtype = torch.set_autocast_dtype


class Scope:
    """What a kernel needs to know of the region that it runs in; immutable and shared by threads."""

    __slots__ = ("cache", "mark", "rules", "table", "task")

    def __init__(self, table: OpTable, cache: CastCache | None, mark: int = DEFAULT_MARK, task: int = -1) -> None:
        self.table, self.rules = table, table.rules
        self.cache = cache
        self.mark = mark
        self.task = task
        """The backward pass (graph task) that the region was entered in, -1 outside of any."""


MAX_DEVICES = 32


class ThreadState:
    """One thread's open regions."""

    __slots__ = ("carried", "casts", "entries", "has_spans", "scopes")

    def __init__(self) -> None:
        self.has_spans = False
        """Whether a region with a table of its own has been open on this thread."""
        self.carried: list[torch.dtype] = []
        """The carriers' own dtypes, while a mark of another table is in their place."""
        self.entries: list[tuple[Any, ...]] = []
        """What leaving each open region restores, outermost first."""
        self.scopes: list[Scope | None] = [None] * MAX_DEVICES
        """Each device's scope, by the device's index."""
        self.casts = REGION_CACHE.entries
        """The casts that leaving the outermost region drops."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.state = ThreadState()
        self.task: int = -1
        self.node: tuple[int, str] | None = None
        self.table_of_node: OpTable | None = None


THREAD = _Thread()


def autocast_key(name: str) -> DispatchKey:
    """Return the dispatch key of that name; some have no member in torch's Python enum."""
    for number in range(64):
        key = DispatchKey(number)
        if torch._C._dispatch_key_name(key) == name:
            return key
    raise OpTableError(f"torch has no dispatch key {name!r}.")


# -- The mark ---------------------------------------------------------------------------------------

CARRIERS = ("ipu", "maia", "mtia")
_KEYS = [autocast_key(f"Autocast{name.upper()}") for name in CARRIERS]
FIRST_KEY = _KEYS[0]
_DIGITS = [torch.float16, torch.bfloat16]  # what torch.autocast accepts, so compiled programs can carry it
_MORE_DIGITS = [
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.complex32,
]

_State = tuple["torch.dtype | None", ...]


def _states(digits: list[torch.dtype]) -> list[_State]:
    return list(itertools.product(digits, [None, *digits], [None, *digits]))


_few = _states(_DIGITS)
_STATES = list(dict.fromkeys(_few + _states(_DIGITS + _MORE_DIGITS)))
_MARKS = {state: mark for mark, state in enumerate(_STATES)}
_COMPILED_MARKS = range(1, len(_few))
_EAGER_MARKS = range(len(_few), len(_STATES))

_Tables = frozenset[tuple[str, OpTable]]
_tables: dict[int, _Tables] = {DEFAULT_MARK: frozenset()}
_marks: dict[tuple[_Tables, bool], int] = {(frozenset(), c): DEFAULT_MARK for c in (False, True)}
_lock = threading.Lock()


def compose_mark(outer: int, device_type: str, table: OpTable | None, *, is_compiled: bool = False) -> int:
    """Return the mark of the region ``outer`` with one device's table replaced; None is its default.

    Raises:
        RegionError: There are more tables in this process than can be told apart.
    """
    if table is None and outer <= DEFAULT_MARK:
        return DEFAULT_MARK
    kept = {(d, t) for d, t in _tables.get(outer, frozenset()) if d != device_type}
    wanted = frozenset(kept if table is None else kept | {(device_type, table)})
    with _lock:
        mark = _marks.get((wanted, is_compiled))
        if mark is None:
            free = _COMPILED_MARKS if is_compiled else _EAGER_MARKS
            mark = next((m for m in free if m not in _tables), NO_MARK)
            if mark == NO_MARK:
                where = "inside compiled functions" if is_compiled else "in one process"
                raise RegionError(
                    f"regions with over {len(free)} different op tables {where}: torch's state can't tell more apart. "
                    "Reuse OpTable objects, or put the region around the compiled function."
                )
            _tables[mark] = wanted
            _marks[wanted, is_compiled] = mark
    return mark


def tables_in_use() -> list[tuple[int, _Tables]]:
    """Return the tables behind every mark so far, in order of first use."""
    return list(_tables.items())


def table_of_mark(mark: int, device: DeviceState) -> OpTable:
    """Return a device's table under a mark; a mark made by another process means the default."""
    return next((t for d, t in _tables.get(mark, ()) if d == device.type), device.table)


def read_mark() -> int:
    """Return the mark in the calling thread's autocast state."""
    if _is_excluded(FIRST_KEY):
        return NO_MARK
    state: list[torch.dtype | None] = [_get_dtype(CARRIERS[0])]
    state += [None if _is_excluded(k) else _get_dtype(name) for k, name in zip(_KEYS[1:], CARRIERS[1:], strict=True)]
    return _MARKS.get(tuple(state), DEFAULT_MARK)


def write_mark(before: int, mark: int) -> None:
    """Replace the mark in the calling thread's autocast state.

    The first carrier's dtype stays at the default mark's while there is no mark, so that entering and
    leaving an ordinary region switches one key.
    """
    if before <= DEFAULT_MARK and mark <= DEFAULT_MARK:
        _set_excluded(FIRST_KEY, mark == NO_MARK)
        return
    thread, state = THREAD.state, _STATES[max(mark, DEFAULT_MARK)]
    if before <= DEFAULT_MARK or not thread.carried:  # empty where the mark came along with torch's state
        thread.carried = [_get_dtype(name) for name in CARRIERS]
    for key, name, dtype, own in zip(_KEYS, CARRIERS, state, thread.carried, strict=True):
        _set_excluded(key, dtype is None or mark == NO_MARK)
        _set_dtype(name, own if dtype is None or mark <= DEFAULT_MARK else dtype)


def mark_contexts(mark: int) -> list[tuple[str, torch.dtype, bool]]:
    """Return what ``torch.autocast`` is given, a carrier each, so that a compiled program carries the mark."""
    return [(name, dtype or _DIGITS[0], dtype is not None) for name, dtype in zip(CARRIERS, _STATES[mark], strict=True)]


# -- Regions that autograd nodes were made in --------------------------------------------------------

sequence_nr = torch._C._autograd._get_sequence_nr


class Span:
    """The autograd nodes made in one region, by their sequence numbers."""

    __slots__ = ("device_type", "end", "owner", "start", "table")

    def __init__(self, device_type: str, table: OpTable) -> None:
        self.device_type, self.table = device_type, table
        self.owner = THREAD.state
        self.owner.has_spans = True
        self.start: int = sequence_nr()
        self.end: int | None = None

    def close(self) -> None:
        self.end = sequence_nr()

    def has(self, nr: int) -> bool:
        return self.start <= nr and (self.end is None or nr < self.end)


_spans: deque[Span] = deque(maxlen=1 << 14)
"""The latest regions with a table of their own, or in one that has; a node in none of them was made with
the default table, or in no region of ours."""


def open_span(device_type: str, scope: Scope) -> Span:
    """Record that nodes made from now on, until the span is closed, are made in ``scope``."""
    span = Span(device_type, scope.table)
    _spans.append(span)
    return span


def record_default(device_type: str, table: OpTable) -> None:
    """Record that nodes made so far, but in the other spans, were made with a table that is no longer the default."""
    span = Span(device_type, table)
    span.end, span.start = span.start, -1
    _spans.append(span)


def _table_of_node(device: DeviceState) -> OpTable | None:
    """Return the table of the recorded region that made the autograd node now running on this thread, or None."""
    node = torch._C._current_autograd_node()
    if node is None:
        return None
    nr = node._sequence_nr()
    if THREAD.task != graph_task() or THREAD.node != (nr, device.type):
        # Autograd numbers nodes per thread. A thread that has spans looks at those alone; one that has none, such as
        # autograd's own, runs what another thread's forward made.
        own = THREAD.state if THREAD.state.has_spans else None
        spans = [s for s in reversed(list(_spans)) if s.device_type == device.type and own in (None, s.owner)]
        spans = [s for s in spans if s.has(nr)]
        table = max(spans, key=lambda s: s.start).table if spans else None  # the innermost: of equals, the latest
        THREAD.task, THREAD.node, THREAD.table_of_node = graph_task(), (nr, device.type), table
    return THREAD.table_of_node


# -- Finding the scope -------------------------------------------------------------------------------


class _RunAsCalled(dict["torch.dtype", "_RunAsCalled"]):
    """Rules under which every op runs as called."""

    def __missing__(self, dtype: torch.dtype) -> _RunAsCalled:
        return self

    def get(self, op: Any, default: Any = None) -> Any:
        return CastPolicy.FALLTHROUGH


_BACKWARD = Scope(OpTable.from_rows({}, name="backward"), None)
_BACKWARD.rules = _RunAsCalled()  # type: ignore[assignment]


def _traces_backward() -> bool:
    """Tell whether AOTAutograd is tracing a backward pass, whose formulas eager autograd would not autocast."""
    return fx_traceback.current_meta.get("partitioner_tag") == "is_backward"


def resolve(device: DeviceState) -> Scope | None:
    """Return the scope of a call where the thread's own doesn't settle it, or None outside every region."""
    scope = THREAD.state.scopes[device.index]
    task, mark = graph_task(), read_mark()
    if mode_depth() and (scope is not None or mark != NO_MARK) and _traces_backward():
        return _BACKWARD
    if scope is not None and scope.task == task:
        if mark != scope.mark and mark != NO_MARK:  # a region inside a program being compiled
            return Scope(table_of_mark(mark, device), None, mark, task)
        return scope if _may_cache() else Scope(scope.table, None, scope.mark, task)
    if task == -1:
        return None if mark == NO_MARK else Scope(table_of_mark(mark, device), None, mark)
    # Regions turn torch's own cache off, and checkpoint restores that flag: then the forward was in one. Autograd's
    # own threads don't have the flag, but have the mark of the thread that called backward.
    is_ours = not torch.is_autocast_cache_enabled() or (scope is None and mark != NO_MARK)
    if not is_ours:
        return None
    table = _table_of_node(device)
    return Scope(device.table if table is None else table, None, mark, task)


def _may_cache() -> bool:
    """Tell whether the dispatch modes on the stack see every run of a program, not just one of it."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return not any(isinstance(mode, _modes_that_replay()) for mode in _get_current_dispatch_mode_stack())


def _modes_that_replay() -> tuple[type, ...]:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch._subclasses.functional_tensor import FunctionalTensorMode
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
    from torch.utils import checkpoint

    policies = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)
    return (FakeTensorMode, FunctionalTensorMode, ProxyTorchDispatchMode, *policies)
