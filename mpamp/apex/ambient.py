"""Regions that a whole process is in: what O1 and O4 turn on, and how all of it is taken back.

Autocast state belongs to a thread, so each thread enters the regions itself: the one that calls
``install`` at once, one that is started later when it starts, one that ran already at its next call of a
module. Backward passes run as called, as they did in apex, which cast in Python only; a Python autograd
Function's own ``backward`` is in the regions again.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
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


class _Thread:
    """One thread's part."""

    def __init__(self) -> None:
        self.generation = 0
        self.regions: tuple[Region, ...] = ()
        self.spans: list[_scope.Span] = []
        self.off = 0
        """How many blocks with casts off are open."""


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
        _patches.replace(threading.Thread, "start", _starting)
        _patches.replace(torch.autograd, "_engine_run_backward", _without_casts)
        _patches.replace(torch.autograd.function.BackwardCFunction, "apply", _with_casts)
        patch(_patches)
        if _process.hook is None:
            _process.hook = register_module_forward_pre_hook(_before_module)
        _synchronize(_local.thread)


def withdraw() -> None:
    """Take it all back. Other threads leave the regions when they end, or at their next call of a module.

    Raises:
        AmpUsageError: In a block with casts off, which only its own end can close.
    """
    with _lock:
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
    for region in _process.regions:
        region.__enter__()
        thread.spans += list(_scope._spans)[-1:]
    thread.regions, thread.generation = _process.regions, _process.generation


def _before_module(module: Any, args: Any) -> None:
    thread = _local.thread
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
        self.run = functools.partial(_run, self.run, _local.thread.off > 0)  # type: ignore[method-assign]
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


def enter_casts_off() -> tuple[Region, ...]:
    """Switch casts off on this thread; returns what ``leave_casts_off`` takes."""
    regions = _process.disabled
    for region in regions:
        region.__enter__()
    _local.thread.off += bool(regions)
    return regions


def leave_casts_off(regions: tuple[Region, ...] | None) -> None:
    """Undo one ``enter_casts_off``."""
    for region in reversed(regions or ()):
        region.__exit__(None, None, None)
    _local.thread.off -= bool(regions)


@contextlib.contextmanager
def casts_off() -> Iterator[None]:
    """Run a block without casts; blocks nest."""
    regions = enter_casts_off()
    try:
        yield
    finally:
        leave_casts_off(regions)


@contextlib.contextmanager
def casts_on() -> Iterator[None]:
    """Run a block with casts in the middle of one without."""
    thread = _local.thread
    with contextlib.ExitStack() as stack:
        if _process.regions and (thread.off or not thread_is_in()):
            for region in _process.regions:
                stack.enter_context(region)
        off, thread.off = thread.off, 0
        try:
            yield
        finally:
            thread.off = off


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
