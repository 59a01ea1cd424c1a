"""Each thread's scopes: the part of a region's state that torch has no place for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..plugins.leftovers import watch_regions
from ..rules.optable import OpTable
from ..torch_internals import current_graph_task_id, len_torch_dispatch_stack
from .casts.cache import REGION_CACHE, CastCache
from .marks import DEFAULT_MARK, NO_MARK, Mark

__all__ = ["MARK", "PLAIN", "THREAD", "Scope", "Scopes", "ThreadState", "graph_task", "mode_depth"]

graph_task = current_graph_task_id
mode_depth = len_torch_dispatch_stack

_NEVER = -2


class _Compiled:
    """The compiled engine, where there is one: it has a copy of every thread's scopes."""

    core: Any = None


class Scope:
    """What a kernel needs to know of the region that it runs in; immutable and shared by threads."""

    __slots__ = ("cache", "core", "mark", "rules", "table", "task")

    def __init__(self, table: OpTable, cache: CastCache | None, mark: Mark = DEFAULT_MARK, task: int = -1) -> None:
        self.table, self.rules = table, table.rules
        self.cache = cache
        self.mark = mark
        self.task = task
        """The backward pass (graph task) that the region was entered in, -1 outside of any."""
        self.core: Any = None
        """The same for the compiled engine, once that has asked for it; False where it leaves the scope to Python."""

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


class ThreadState:
    """One thread's open regions."""

    __slots__ = ("casts", "entries", "put", "scopes")

    def __init__(self) -> None:
        self.entries: list[list[Any]] = []
        """Each open region, outermost first: which, torch's cache flag before it, and what else leaving it sets."""
        self.scopes: list[Any] = [None] * MAX_DEVICES + [NO_MARK]
        """Each device's scope, by the device's index; then the mark."""
        self.put: Callable[[int, Any], Any] = self.scopes.__setitem__
        self.casts: Any = REGION_CACHE.entries
        """The casts that leaving the outermost region drops."""

    def attach(self) -> None:
        """Have the compiled engine see what is put into the calling thread's scopes; it leaves others' to Python.

        It does so until the state is gone, which an exception may have happen before any region had it.
        """
        casts = _Casts(REGION_CACHE.entries)
        self.put = _Compiled.core.attach(self.entries, self.scopes, casts.entries)
        self.casts = casts


class _Casts:
    """The casts of a thread's regions, of both engines."""

    __slots__ = ("entries",)

    def __init__(self, entries: Any) -> None:
        self.entries = entries

    def __bool__(self) -> bool:
        return bool(self.entries) or _Compiled.core.has_casts()

    def clear(self) -> None:
        self.entries.clear()
        _Compiled.core.clear_region()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.state = ThreadState()
        if _Compiled.core is not None:
            self.state.attach()


THREAD = _Thread()
watch_regions(lambda: THREAD.state.entries)


def connect(core: Any) -> None:
    """Have the compiled engine see scopes: those of this thread, and of threads that come to have some."""
    state = THREAD.state  # a thread that has none yet attaches as it is made, once `core` is there
    _Compiled.core = core
    state.attach()
