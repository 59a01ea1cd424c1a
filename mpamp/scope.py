"""Which op table is in force for a call: the part of a region's state that torch has no place for.

It is always one that was carried here, never one that is inferred:

* inside a region of the calling thread: that region's scope;
* in the backward of an autograd Function: the scopes of the call that made it (``carrying`` keeps them there);
* in a compiled program and on autograd's own threads: the tables behind the mark in torch's state (``marks``).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.fx.traceback as fx_traceback
from torch._C import _TorchDispatchModeKey as ModeKey

from .castcache import REGION_CACHE, CastCache
from .marks import DEFAULT_MARK, NO_MARK, Mark, read_mark
from .optable import OpTable
from .policy import CastPolicy

if TYPE_CHECKING:
    from .registry import DeviceState

__all__ = ["DEVICES", "PLAIN", "THREAD", "Scope", "mark_here", "resolve", "scopes_here"]

graph_task = torch._C._current_graph_task_id
mode_depth = torch._C._len_torch_dispatch_stack
_node = torch._C._current_autograd_node
_get_cache = torch.is_autocast_cache_enabled
_get_mode = torch._C._get_dispatch_mode

_NEVER = -2


class Scope:
    """What a kernel needs to know of the region that it runs in; immutable and shared by threads."""

    __slots__ = ("cache", "mark", "rules", "table", "task")

    def __init__(self, table: OpTable, cache: CastCache | None, mark: Mark = DEFAULT_MARK, task: int = -1) -> None:
        self.table, self.rules = table, table.rules
        self.cache = cache
        self.mark = mark
        self.task = task
        """The backward pass (graph task) that the region was entered in, -1 outside of any."""

    def again(self, task: int, *, keep: bool = False) -> Scope:
        """Return the scope as it is in a backward pass; casts are kept there only where ``keep`` says so."""
        return Scope(self.table, self.cache if keep else None, self.mark, task)


PLAIN = Scope(OpTable.from_rows({}, name="torch"), None, NO_MARK, _NEVER)
"""Stands for no scope at all, where another one surrounds it: what is recomputed was outside of every region."""

Scopes = tuple["Scope | None", ...]
"""The scope of each device, in the order of ``DEVICES``; there may be fewer."""
MAX_DEVICES = 32
MARK = MAX_DEVICES
"""Where a thread's list of scopes has the mark that its own regions put into torch's state."""
DEVICES: list[DeviceState] = []
"""The devices that a region has asked for so far; each one's index is its place here."""


class ThreadState:
    """One thread's open regions."""

    __slots__ = ("casts", "entries", "put", "scopes")

    def __init__(self) -> None:
        self.entries: list[list[Any]] = []
        """Each open region, outermost first: which, torch's cache flag before it, and what else leaving it sets."""
        self.scopes: list[Any] = [None] * MAX_DEVICES + [NO_MARK]
        """Each device's scope, by the device's index; then the mark."""
        self.put = self.scopes.__setitem__
        self.casts = REGION_CACHE.entries
        """The casts that leaving the outermost region drops."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.state = ThreadState()


THREAD = _Thread()


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
    """Tell whether AOTAutograd traces a backward pass on this thread, whose formulas eager autograd would not autocast.

    The tag is the process's: it counts for the thread that is tracing.
    """
    if _get_mode(ModeKey.PROXY) is None and _get_mode(ModeKey.FUNCTIONAL) is None:
        return False
    return fx_traceback.current_meta.get("partitioner_tag") == "is_backward"


def resolve(device: DeviceState) -> Scope | None:
    """Return the scope of a call where the thread's own doesn't settle it, or None outside every region."""
    state, task = THREAD.state, graph_task()
    scope: Scope | None = state.scopes[device.index]
    if task != -1 and (scope is None or scope.task != task) and scope is not PLAIN:
        carried = getattr(_node(), "_mpamp_scopes", None)
        if carried is not None:
            made_in = carried[device.index] if device.index < len(carried) else None
            return None if made_in is None or made_in is PLAIN else made_in.again(task)
    mark = read_mark(bool(state.entries) or task != -1)
    if mode_depth() and (scope is not None or mark is not NO_MARK) and _traces_backward():
        return _BACKWARD
    if mark is not NO_MARK and mark is not state.scopes[MARK]:  # a compiled program's, or of what called backward
        table = mark.table(device.type)
        return Scope(device.table if table is None else table, None, mark, task)
    if scope is None or scope is PLAIN:
        return None
    return scope if scope.task == task and _may_cache() else scope.again(task)


def mark_here() -> Mark:
    """Return the mark that is in force on the calling thread."""
    state = THREAD.state
    return read_mark(bool(state.entries) or graph_task() != -1)


def scopes_here() -> Scopes:
    """Return every device's scope here and now."""
    state, task = THREAD.state, graph_task()
    if task == -1 and not mode_depth():
        if not state.entries:
            if read_mark(False) is NO_MARK:
                return ()
        elif not _get_cache():
            return tuple(state.scopes[: len(DEVICES)])
    return tuple([resolve(device) for device in list(DEVICES)])


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
