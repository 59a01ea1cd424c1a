"""Each thread's scopes: the part of a region's state that torch has no place for."""

from __future__ import annotations

import threading
from typing import Any

import torch

from ..plugins.leftovers import watch_regions
from ..rules.optable import OpTable
from .casts.cache import REGION_CACHE, CastCache
from .marks import DEFAULT_MARK, NO_MARK, Mark

__all__ = ["MARK", "PLAIN", "THREAD", "Scope", "Scopes", "ThreadState", "graph_task", "mode_depth"]

graph_task = torch._C._current_graph_task_id
mode_depth = torch._C._len_torch_dispatch_stack

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
watch_regions(lambda: THREAD.state.entries)
