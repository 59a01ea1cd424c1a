"""The two locks of mpamp, in their one order: a thread may take ``LOCK`` in its ``turn()``, never the other way round.

``LOCK`` guards what threads share. It is held shortly, and never while code of others runs: no import, no hook, no
method of a backend. Those run in a ``turn()``, one thread at a time.

A process is forked with both held, so that the child finds nothing half done and no lock that nobody will release.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["LOCK", "burst", "turn"]

LOCK = threading.RLock()

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

    def take(self) -> bool:
        """Take the lock, or tell that this thread must go ahead without it."""
        while not self._lock.acquire(timeout=_POLL_SECONDS):
            if _is_importing() and _waits_for_import(self._holder):
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


_turn = _Turn()


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


_taken_to_fork: list[bool] = []


def _before_fork() -> None:
    is_taken = _turn.take()
    LOCK.acquire()
    _taken_to_fork.append(is_taken)


def _after_fork_in_parent() -> None:
    is_taken = _taken_to_fork.pop()
    LOCK.release()
    if is_taken:
        _turn.give_back()


def _after_fork_in_child() -> None:
    if not _taken_to_fork[-1]:
        _turn.__init__()  # type: ignore[misc]  # the thread that has it is not in the child
    _after_fork_in_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
