"""Regions that a whole process is in: what O1 and O4 turn on, and how all of it is taken back.

Autocast state belongs to a thread, so each thread enters the regions itself: the one that calls
``install`` at once, one that is started later when it starts, one that ran already at its next call of a
module. Backward passes run as called, as they did in apex, which cast in Python only; a Python autograd
Function's own ``backward`` is in the regions again.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from .. import scope as _scope
from ..autocast import Region, autocast
from .errors import AmpUsageError
from .patches import Patches

__all__ = [
    "casts_off",
    "casts_on",
    "enter_casts_off",
    "install",
    "installed",
    "is_casting",
    "leave_casts_off",
    "thread_is_in",
    "withdraw",
]


class Guard:
    """An open block with casts off; ``frame`` is the call that it ends with, where nothing else ends it."""

    __slots__ = ("frame", "regions")

    def __init__(self, regions: tuple[Region, ...], frame: FrameType | None) -> None:
        self.regions, self.frame = regions, frame


class _Thread:
    """One thread's part."""

    def __init__(self) -> None:
        self.generation = 0
        self.regions: tuple[Region, ...] = ()
        self.spans: list[_scope.Span] = []
        self.guards: list[Guard] = []
        """The blocks with casts off that are open, outermost first."""

    @property
    def off(self) -> bool:
        """Whether casts are off."""
        return bool(self.guards)


class _Local(threading.local):
    def __init__(self) -> None:
        self.thread = _Thread()
        _threads.add(self.thread)


_threads: weakref.WeakSet[_Thread] = weakref.WeakSet()
_local = _Local()
_lock = threading.RLock()
_patches = Patches()


class _Process:
    """What every thread is to be in."""

    def __init__(self) -> None:
        self.generation = 0
        self.regions: tuple[Region, ...] = ()
        self.disabled: tuple[Region, ...] = ()
        self.hook: Any = None


_process = _Process()


def install(regions: Sequence[Region], patch: Callable[[Patches], None]) -> None:
    """Put every thread of the process into ``regions``, and make the patches that they need; what was goes.

    Args:
        regions: One for each device type.
        patch: Makes patches of its own.
    """
    with _lock:
        withdraw()
        _process.generation += 1
        _process.regions = tuple(regions)
        _process.disabled = tuple(autocast(r.device_type, enabled=False) for r in regions)
        try:
            _synchronize(_local.thread)
            _patches.replace(threading.Thread, "start", _starting)
            _patches.replace(torch.autograd, "_engine_run_backward", _without_casts)
            _patches.replace(torch.autograd.function.BackwardCFunction, "apply", _with_casts)
            patch(_patches)
        except BaseException:
            withdraw()
            raise
        if _process.hook is None:
            _process.hook = register_module_forward_pre_hook(_before_module)


def withdraw() -> None:
    """Take it all back. Other threads leave the regions when they end, or at their next call of a module.

    Raises:
        AmpUsageError: In a block with casts off, which only its own end can close.
    """
    with _lock:
        heal()
        if _local.thread.off:
            raise AmpUsageError("amp can't be shut down or initialized anew inside disable_casts or optimizer.step.")
        _process.generation += 1
        _process.regions = _process.disabled = ()
        _patches.withdraw()
        _synchronize(_local.thread)
        _drop_hook()


def installed() -> list[str]:
    """Return what is in place now, a line each: the calling thread's regions, patches and hooks."""
    hook = [] if _process.hook is None else ["module forward pre-hook"]
    return [*map(repr, _local.thread.regions), *_patches.names(), *hook]


def is_casting() -> bool:
    """Tell whether functions called on this thread are cast."""
    heal()
    return bool(_process.regions) and not _local.thread.off


def devices() -> set[str]:
    """Return the device types whose tensors are cast."""
    return {region.device_type for region in _process.regions}


def thread_is_in() -> bool:
    """Tell whether the calling thread is in the regions."""
    return bool(_local.thread.regions) and _local.thread.generation == _process.generation


# -- Each thread's part ------------------------------------------------------------------------------


def _synchronize(thread: _Thread) -> None:
    """Have the calling thread leave what it is in, and enter what it is to be in."""
    if thread.regions:
        entries = _scope.THREAD.state.entries
        if not entries or entries[-1][0] is not thread.regions[-1]:
            if thread is not _local.thread or thread.generation == _process.generation:
                return
            if entries and entries[-1][0] not in thread.regions:
                raise AmpUsageError("amp can't be shut down or initialized anew inside an open region.")
        for region in reversed(thread.regions):
            region.__exit__(None, None, None)
    thread.regions, thread.spans = (), []
    thread.generation = _process.generation
    for region in _process.regions:
        region.__enter__()
        thread.regions += (region,)
        thread.spans += list(_scope._spans)[-1:]


def _before_module(module: Any, args: Any) -> None:
    thread = _local.thread
    heal()
    if thread.generation != _process.generation and not thread.off and _is_on_top(thread):
        with _lock:
            _synchronize(thread)
            _drop_hook()


def _is_on_top(thread: _Thread) -> bool:
    entries = _scope.THREAD.state.entries
    return not entries if not thread.regions else bool(entries) and entries[-1][0] is thread.regions[-1]


def _drop_hook() -> None:
    """Remove the module hook once no thread needs it to leave the regions."""
    if _process.hook is not None and not _process.regions and not any(t.regions for t in list(_threads)):
        _process.hook.remove()
        _process.hook = None


def _starting(start: Any) -> Any:
    @functools.wraps(start)
    def wrapper(self: threading.Thread) -> Any:
        self.run = functools.partial(_run, self.run, _local.thread.off)  # type: ignore[method-assign]
        return start(self)

    return wrapper


def _run(run: Callable[[], None], off: bool) -> None:
    thread = _local.thread
    with _lock:
        _synchronize(thread)
    try:
        with casts_off() if off else contextlib.nullcontext():
            run()
    finally:
        for region in reversed(thread.regions):
            region.__exit__(None, None, None)
        thread.regions = ()
        with _lock:
            _drop_hook()


# -- Blocks ------------------------------------------------------------------------------------------


def enter_casts_off(frame: FrameType | None = None) -> Guard | None:
    """Switch casts off on this thread; returns what ``leave_casts_off`` takes.

    Args:
        frame: The call that casts are off for, if that may end without ``leave_casts_off``, by an exception.
    """
    heal()
    if not _process.disabled:
        return None
    for region in _process.disabled:
        region.__enter__()
    guard = Guard(_process.disabled, frame)
    _local.thread.guards.append(guard)
    return guard


def leave_casts_off(guard: Guard | None) -> None:
    """Undo one ``enter_casts_off``; again does nothing."""
    guards = _local.thread.guards
    if guard is not None and guard in guards:
        guards.remove(guard)
        for region in reversed(guard.regions):
            region.__exit__(None, None, None)


def heal() -> None:
    """Close the blocks whose call has ended with an exception."""
    guards = _local.thread.guards
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
    thread = _local.thread
    with contextlib.ExitStack() as stack:
        if _process.regions and (thread.off or not thread_is_in()):
            for region in _process.regions:
                stack.enter_context(region)
        guards, thread.guards = thread.guards, []
        try:
            yield
        finally:
            thread.guards = guards


# -- Backward passes ---------------------------------------------------------------------------------


def _without_casts(run_backward: Any) -> Any:
    @functools.wraps(run_backward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for span in _local.thread.spans:
            if not any(known is span for known in _scope._spans):  # pushed out by a thousand newer ones
                _scope._spans.append(span)
        with casts_off():
            return run_backward(*args, **kwargs)

    return wrapper


def _with_casts(apply: Any) -> Any:
    @functools.wraps(apply)
    def wrapper(self: Any, *args: Any) -> Any:
        with casts_on():
            return apply(self, *args)

    return wrapper
