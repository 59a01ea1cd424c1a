"""Blocks with casts off, and on again, in the process-wide regions of O1 and O4."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from ..locks import LOCK
from ..regions.region import Region

__all__ = [
    "LOCAL",
    "PROCESS",
    "threads",
    "ThreadPart",
    "casts_off",
    "casts_on",
    "devices",
    "is_casting",
]


class ThreadPart:
    """One thread's part."""

    def __init__(self) -> None:
        self.generation = 0
        self.regions: tuple[Region, ...] = ()
        self.blocks_off = 0
        """How many blocks with casts off are open."""

    @property
    def off(self) -> bool:
        """Whether casts are off."""
        return self.blocks_off > 0


class _Local(threading.local):
    def __init__(self) -> None:
        self.thread = ThreadPart()
        with LOCK:
            _threads.add(self.thread)


_threads: weakref.WeakSet[ThreadPart] = weakref.WeakSet()
LOCAL = _Local()


def threads() -> list[ThreadPart]:
    """Return the part of every thread that is alive and has one."""
    with LOCK:
        return list(_threads)


class ProcessPart:
    """What every thread is to be in."""

    def __init__(self) -> None:
        self.generation = 0
        self.regions: tuple[Region, ...] = ()
        self.disabled: tuple[Region, ...] = ()
        self.hook: Any = None
        self.patch: Any = None
        """What makes the patches that go with the regions."""


PROCESS = ProcessPart()


def is_casting() -> bool:
    """Tell whether functions called on this thread are cast."""
    return bool(PROCESS.regions) and not LOCAL.thread.off


def devices() -> set[str]:
    """Return the device types whose tensors are cast."""
    return {region.device_type for region in PROCESS.regions}


def thread_is_in() -> bool:
    """Tell whether the calling thread is in the regions."""
    return bool(LOCAL.thread.regions) and LOCAL.thread.generation == PROCESS.generation


@contextlib.contextmanager
def casts_off() -> Iterator[None]:
    """Run a block without casts on this thread; blocks nest."""
    with contextlib.ExitStack() as stack:
        if PROCESS.disabled:
            for region in PROCESS.disabled:
                stack.enter_context(region)
            stack.enter_context(_counted(LOCAL.thread, 1))
        yield


@contextlib.contextmanager
def casts_on() -> Iterator[None]:
    """Run a block with casts in the middle of one without."""
    thread = LOCAL.thread
    with contextlib.ExitStack() as stack:
        if PROCESS.regions and (thread.off or not thread_is_in()):
            for region in PROCESS.regions:
                stack.enter_context(region)
        stack.enter_context(_counted(thread, -thread.blocks_off))
        yield


@contextlib.contextmanager
def _counted(thread: ThreadPart, change: int) -> Iterator[None]:
    thread.blocks_off += change
    try:
        yield
    finally:
        thread.blocks_off -= change
