"""Blocks with casts off, and on again, in the process-wide regions of O1 and O4."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

from ..autocast import Region

__all__ = [
    "LOCAL",
    "PROCESS",
    "threads",
    "ThreadPart",
    "casts_off",
    "casts_on",
    "devices",
    "enter_casts_off",
    "heal",
    "is_casting",
    "is_running",
    "leave_casts_off",
]


class Guard:
    """An open block with casts off; ``frame`` is the call that it ends with, where nothing else ends it."""

    __slots__ = ("frame", "regions")

    def __init__(self, regions: tuple[Region, ...], frame: FrameType | None) -> None:
        self.regions, self.frame = regions, frame


class ThreadPart:
    """One thread's part."""

    def __init__(self) -> None:
        self.generation = 0
        self.regions: tuple[Region, ...] = ()
        self.guards: list[Guard] = []
        """The blocks with casts off that are open, outermost first."""

    @property
    def off(self) -> bool:
        """Whether casts are off."""
        return bool(self.guards)


class _Local(threading.local):
    def __init__(self) -> None:
        self.thread = ThreadPart()
        with _lock:
            _threads.add(self.thread)


_threads: weakref.WeakSet[ThreadPart] = weakref.WeakSet()
_lock = threading.Lock()
LOCAL = _Local()


def threads() -> list[ThreadPart]:
    """Return the part of every thread that is alive and has one."""
    with _lock:
        return list(_threads)


class ProcessPart:
    """What every thread is to be in."""

    def __init__(self) -> None:
        self.generation = 0
        self.regions: tuple[Region, ...] = ()
        self.disabled: tuple[Region, ...] = ()
        self.hook: Any = None


PROCESS = ProcessPart()


def is_casting() -> bool:
    """Tell whether functions called on this thread are cast."""
    heal()
    return bool(PROCESS.regions) and not LOCAL.thread.off


def devices() -> set[str]:
    """Return the device types whose tensors are cast."""
    return {region.device_type for region in PROCESS.regions}


def thread_is_in() -> bool:
    """Tell whether the calling thread is in the regions."""
    return bool(LOCAL.thread.regions) and LOCAL.thread.generation == PROCESS.generation


def enter_casts_off(frame: FrameType | None = None) -> Guard | None:
    """Switch casts off on this thread; returns what ``leave_casts_off`` takes.

    Args:
        frame: The call that casts are off for, if that may end without ``leave_casts_off``, by an exception.
    """
    heal()
    if not PROCESS.disabled:
        return None
    for region in PROCESS.disabled:
        region.__enter__()
    guard = Guard(PROCESS.disabled, frame)
    LOCAL.thread.guards.append(guard)
    return guard


def leave_casts_off(guard: Guard | None) -> None:
    """Undo one ``enter_casts_off``; again does nothing."""
    guards = LOCAL.thread.guards
    if guard is not None and guard in guards:
        guards.remove(guard)
        for region in reversed(guard.regions):
            region.__exit__(None, None, None)


def heal() -> None:
    """Close the blocks whose call has ended with an exception."""
    guards = LOCAL.thread.guards
    while guards and guards[-1].frame is not None and not is_running(guards[-1].frame):
        leave_casts_off(guards[-1])


def is_running(frame: FrameType) -> bool:
    """Tell whether a call is on this thread's stack."""
    current: FrameType | None = sys._getframe(1)
    while current is not None and current is not frame:
        current = current.f_back
    return current is frame


@contextlib.contextmanager
def casts_off() -> Iterator[None]:
    """Run a block without casts; blocks nest."""
    guard = enter_casts_off()
    try:
        yield
    finally:
        leave_casts_off(guard)


@contextlib.contextmanager
def casts_on() -> Iterator[None]:
    """Run a block with casts in the middle of one without."""
    heal()
    thread = LOCAL.thread
    with contextlib.ExitStack() as stack:
        if PROCESS.regions and (thread.off or not thread_is_in()):
            for region in PROCESS.regions:
                stack.enter_context(region)
        guards, thread.guards = thread.guards, []
        try:
            yield
        finally:
            thread.guards = guards
