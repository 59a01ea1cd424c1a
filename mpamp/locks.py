"""The locks of mpamp, all made here, in their one order: those that are ``made()`` for installing, ``turn()``,
``LOCK``, those that are ``made()`` for a part of its own. A thread that has one takes none that comes before it.

``LOCK`` guards what threads share. It is held shortly, and never while code of others runs: no import, no hook, no
method of a backend. Those run in a ``turn()``, one thread at a time, or where something is installed.

A process is forked with all of them held, so that the child finds nothing half done and no lock that nobody will
release. A fork doesn't wait for ever: a lock whose holder goes on and on is a new one in the child.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from enum import IntEnum
from types import FrameType
from typing import Any

__all__ = ["LOCK", "Rank", "burst", "made", "turn"]


class Rank(IntEnum):
    """Where a lock is in the order."""

    INSTALLING = 0
    """Held while torch's names are replaced, by code that imports."""
    TURN = 1
    SHARED = 2
    """``LOCK``."""
    PART = 3
    """Held shortly, by what takes no other lock."""


_made: list[tuple[Rank, int, weakref.ref[Any]]] = []
"""Every lock, in the order; of two of a rank the one made first comes first."""
_numbers = iter(range(2**62))


def made(rank: Rank) -> Any:
    """Make a re-entrant lock that is free, or held by the thread that forks, in a forked child.

    Example:
        >>> lock = made(Rank.PART)
        >>> with lock, lock:
        ...     pass
    """
    return _register(threading.RLock(), rank)


def _register(lock: Any, rank: Rank) -> Any:
    number = next(_numbers)

    def forget(gone: weakref.ref[Any]) -> None:
        _made[:] = [each for each in _made if each[2] is not gone]

    _made[:] = sorted([*_made, (rank, number, weakref.ref(lock, forget))], key=lambda each: each[:2])
    return lock


LOCK = made(Rank.SHARED)

_IMPORTLIB = "<frozen importlib._bootstrap>"
_POLL_SECONDS = 0.01


class _Turn:
    """A re-entrant lock to hold while others' code runs, which may import.

    Python locks each module that is being imported, and a module may ask for a device in its body: no order of
    locks can be kept. So a thread that is importing doesn't wait for a holder that itself waits for an import, but
    goes ahead; two threads may then do the same work, and the first result counts.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holder: int | None = None
        self._depth = 0

    def take(self, seconds: float = float("inf")) -> bool:
        """Take the lock, or tell that this thread must go ahead without it: after so many seconds, if it must then."""
        end = time.monotonic() + seconds
        while not self._lock.acquire(timeout=_POLL_SECONDS):
            if (_is_importing() and _waits_for_import(self._holder)) or time.monotonic() > end:
                return False
        self._holder = threading.get_ident()
        self._depth += 1
        return True

    def give_back(self) -> None:
        """Release the lock that ``take`` took."""
        self._depth -= 1
        if self._depth == 0:
            self._holder = None
        self._lock.release()


_turn = _register(_Turn(), Rank.TURN)


class _Bursts:
    open = 0
    was_enabled = False


@contextlib.contextmanager
def burst() -> Iterator[None]:
    """Make many objects that stay: the collector would look through all of torch's for nothing, which takes longer.

    Example:
        >>> with burst():
        ...     gc.isenabled()
        False
    """
    with LOCK:
        if _Bursts.open == 0:
            _Bursts.was_enabled = gc.isenabled()
            gc.disable()
        _Bursts.open += 1
    try:
        yield
    finally:
        with LOCK:
            _Bursts.open -= 1
            if _Bursts.open == 0 and _Bursts.was_enabled:
                gc.enable()


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """Be the thread whose turn it is to run code of others; see the module on who doesn't wait for it.

    Example:
        >>> with turn(), turn(), LOCK:
        ...     pass
    """
    is_taken = _turn.take()
    try:
        yield
    finally:
        if is_taken:
            _turn.give_back()


def _is_importing() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTLIB:
            return True
        frame = frame.f_back
    return False


def _waits_for_import(thread: int | None) -> bool:
    frame = None if thread is None else sys._current_frames().get(thread)
    return frame is not None and frame.f_code.co_filename == _IMPORTLIB and frame.f_code.co_name == "acquire"


# -- Forks ---------------------------------------------------------------------------------------------

_FORK_SECONDS = 5.0
"""How long a fork waits for one lock; only what imports or runs code of others holds one for so long."""
_taken_to_fork: list[list[tuple[Any, bool]]] = []


def _before_fork() -> None:
    locks = [lock for _, _, ref in _made if (lock := ref()) is not None]
    _taken_to_fork.append([(lock, _take(lock)) for lock in locks])


def _take(lock: Any) -> bool:
    if isinstance(lock, _Turn):
        return lock.take(_FORK_SECONDS)
    end = time.monotonic() + _FORK_SECONDS
    while not lock.acquire(timeout=_POLL_SECONDS):
        if time.monotonic() > end or (_is_importing() and _is_any_importing()):
            return False
    return True


def _is_any_importing() -> bool:
    return any(_waits_for_import(thread) for thread in list(sys._current_frames()))


def _after_fork_in_parent() -> None:
    for lock, is_taken in reversed(_taken_to_fork.pop()):
        if is_taken and isinstance(lock, _Turn):
            lock.give_back()
        elif is_taken:
            lock.release()


def _after_fork_in_child() -> None:
    for lock, is_taken in _taken_to_fork[-1]:
        if not is_taken and isinstance(lock, _Turn):
            lock.__init__()  # type: ignore[misc]  # the thread that has it is not in the child
        elif not is_taken:
            lock._at_fork_reinit()
    _after_fork_in_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
