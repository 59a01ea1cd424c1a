"""Calls of compiled code, as they begin and end: who watches ops leaves it alone, and can say how often it ran.

``torch.compile`` gives functions that set the thread's callback for frames to None, run, and put back what it was
before. The function that sets it is wrapped, once and for good: it gives them something of ours to put back, which says
that the call is over. Nothing that they run is changed, and no guard of a compiled program knows of it.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..importing import after_import
from ..torch_internals import EVAL_FRAME, SET_EVAL_FRAME, begins_compiled_code

__all__ = ["CompiledCalls", "compiled_calls_followed", "is_in_compiled_code"]

Leave = Callable[[], None]


class CompiledCalls:
    """Counts the calls of compiled code in all threads, those inside of others left out.

    Args:
        enter: Called when one begins, on its thread; returns what is called when it is over.
    """

    def __init__(self, enter: Callable[[], Leave] | None = None) -> None:
        self.count = 0
        self._enter = enter

    def begin(self) -> Leave | None:
        """A call begins."""
        self.count += 1
        return None if self._enter is None else self._enter()


class _Thread(threading.local):
    depth = 0


_THREAD = _Thread()
_FOLLOWERS: list[CompiledCalls] = []


@contextmanager
def compiled_calls_followed(calls: CompiledCalls) -> Iterator[CompiledCalls]:
    """Count calls of compiled code inside.

    Example:
        >>> import torch
        >>> layer = torch.compile(torch.nn.Linear(2, 2), backend="eager")
        >>> with compiled_calls_followed(CompiledCalls()) as calls:
        ...     y = layer(torch.ones(1, 2))
        >>> calls.count
        1
    """
    after_import(EVAL_FRAME, _serve)
    _FOLLOWERS.append(calls)
    try:
        yield calls
    finally:
        _FOLLOWERS.remove(calls)


def is_in_compiled_code() -> bool:
    """Tell whether this thread is in a call of compiled code that began while calls of it were followed."""
    return _THREAD.depth > 0


class _Entered:
    """What a compiled function puts back at its end: the callback that there was, once those who follow know."""

    def __init__(self, prior: Any, leaves: list[Leave]) -> None:
        self._prior, self._leaves = prior, leaves

    def over(self) -> Any:
        _THREAD.depth = 0
        for leave in self._leaves:
            leave()
        return self._prior


def _serve() -> None:
    module = sys.modules[EVAL_FRAME]
    original = getattr(module, SET_EVAL_FRAME[0], None)
    if original is None or hasattr(original, "__wrapped__"):
        return  # not torch as it is known: compiled code isn't followed

    @functools.wraps(original)
    def set_eval_frame(callback: Any) -> Any:
        if callback is None and _FOLLOWERS and _THREAD.depth == 0:
            if begins_compiled_code(sys._getframe(1)):
                return _Entered(original(None), _entered())
        elif type(callback) is _Entered:
            return original(callback.over())
        return original(callback)

    for name in SET_EVAL_FRAME:
        if getattr(module, name, None) is original:
            setattr(module, name, set_eval_frame)


def _entered() -> list[Leave]:
    _THREAD.depth = 1
    leaves = [follower.begin() for follower in tuple(_FOLLOWERS)]
    return [leave for leave in reversed(leaves) if leave is not None]
