"""Which op table is in force for a call.

It is always one that was carried here, never one that is inferred:

* inside a region of the calling thread: that region's scope;
* in the backward of an autograd Function: the scopes of the call that made it (``carrying`` keeps them there);
* in a compiled program and on autograd's own threads: the tables behind the mark in torch's state (``marks``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx.traceback as fx_traceback

from ..devices.registry import DEVICES, DeviceState
from ..rules.optable import OpTable
from ..rules.policy import CastPolicy
from ..torch_internals import (
    CachedTorchDispatchMode,
    CachingTorchDispatchMode,
    FakeTensorMode,
    FunctionalTensorMode,
    ProxyTorchDispatchMode,
    current_autograd_node,
    get_current_dispatch_mode_stack,
    get_dispatch_mode,
)
from ..torch_internals import TorchDispatchModeKey as ModeKey
from .marks import NO_MARK, Mark, read_mark
from .scope import MARK, PLAIN, THREAD, Scope, Scopes, graph_task, mode_depth

__all__ = ["mark_here", "resolve", "scopes_here"]

_node = current_autograd_node
_get_cache = torch.is_autocast_cache_enabled
_get_mode = get_dispatch_mode


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

    return not any(isinstance(mode, _modes_that_replay()) for mode in get_current_dispatch_mode_stack())


def _modes_that_replay() -> tuple[type, ...]:

    policies = (CachingTorchDispatchMode, CachedTorchDispatchMode)
    return (FakeTensorMode, FunctionalTensorMode, ProxyTorchDispatchMode, *policies)
