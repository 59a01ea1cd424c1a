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
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from ..engine.scope import THREAD
from ..locks import turn
from ..patching import Patches
from ..regions.region import Region, autocast
from ..torch_internals import RUN_BACKWARD
from .blocks import LOCAL, PROCESS, ThreadPart, casts_off, casts_on, threads
from .errors import AmpUsageError

__all__ = ["install", "installed", "now", "put_back", "withdraw"]

Installed = tuple[Sequence[Region], Callable[[Patches], None]]

_patches = Patches()


def install(regions: Sequence[Region], patch: Callable[[Patches], None]) -> None:
    """Put every thread of the process into ``regions``, and make the patches that they need; what was goes.

    What was stays if this fails.

    Args:
        regions: One for each device type.
        patch: Makes patches of its own.
    """
    with turn():
        before = now()
        withdraw()
        PROCESS.generation += 1
        PROCESS.regions = tuple(regions)
        PROCESS.patch = patch
        PROCESS.disabled = tuple(autocast(r.device_type, enabled=False) for r in regions)
        try:
            _synchronize(LOCAL.thread)
            _patches.wrap(threading.Thread, "start", _starting)
            _patches.wrap(*RUN_BACKWARD, _without_casts)
            _patches.wrap(torch.autograd.function.BackwardCFunction, "apply", _with_casts)
            patch(_patches)
        except BaseException:
            withdraw()
            put_back(before)
            raise
        if PROCESS.hook is None:
            PROCESS.hook = register_module_forward_pre_hook(_before_module)


def now() -> Installed | None:
    """Return what the process is in, for ``put_back``."""
    return (PROCESS.regions, PROCESS.patch) if PROCESS.regions else None


def put_back(before: Installed | None) -> None:
    """Have the process be in what ``now`` returned; nothing if it is."""
    if before != now():
        if before is None:
            withdraw()
        else:
            install(*before)


def withdraw() -> None:
    """Take it all back. Other threads leave the regions when they end, or at their next call of a module.

    Raises:
        AmpUsageError: In a block with casts off, which only its own end can close.
    """
    with turn():
        if LOCAL.thread.off:
            raise AmpUsageError("amp can't be shut down or initialized anew inside disable_casts or optimizer.step.")
        _refuse_inside_a_region(LOCAL.thread)
        PROCESS.generation += 1
        PROCESS.regions = PROCESS.disabled = ()
        _patches.undo()
        _synchronize(LOCAL.thread)
        _drop_hook()


def installed() -> list[str]:
    """Return what is in place now, a line each: the calling thread's regions, patches and hooks."""
    hook = [] if PROCESS.hook is None else ["module forward pre-hook"]
    return [*map(repr, LOCAL.thread.regions), *_patches.names(), *hook]


# -- Each thread's part ------------------------------------------------------------------------------


def _refuse_inside_a_region(thread: ThreadPart) -> None:
    entries = THREAD.state.entries
    if thread.regions and entries and entries[-1][0] not in thread.regions:
        raise AmpUsageError("amp can't be shut down or initialized anew inside an open region.")


def _synchronize(thread: ThreadPart) -> None:
    """Have the calling thread leave what it is in, and enter what it is to be in."""
    if thread.regions:
        entries = THREAD.state.entries
        is_on_top = entries and entries[-1][0] is thread.regions[-1]
        if not is_on_top and thread.generation == PROCESS.generation:
            return
        for region in reversed(thread.regions):
            region.__exit__(None, None, None)
    thread.regions = ()
    thread.generation = PROCESS.generation
    for region in PROCESS.regions:
        region.__enter__()
        thread.regions += (region,)


def _before_module(module: Any, args: Any) -> None:
    thread = LOCAL.thread
    if thread.generation != PROCESS.generation and not thread.off and _is_on_top(thread):
        with turn():
            _synchronize(thread)
            _drop_hook()


def _is_on_top(thread: ThreadPart) -> bool:
    entries = THREAD.state.entries
    return not entries if not thread.regions else bool(entries) and entries[-1][0] is thread.regions[-1]


def _drop_hook() -> None:
    """Remove the module hook once no thread needs it to leave the regions."""
    if PROCESS.hook is not None and not PROCESS.regions and not any(t.regions for t in threads()):
        PROCESS.hook.remove()
        PROCESS.hook = None


def _starting(start: Any) -> Any:
    @functools.wraps(start)
    def wrapper(self: threading.Thread) -> Any:
        self.run = functools.partial(_run, self.run, LOCAL.thread.off)  # type: ignore[method-assign]
        return start(self)

    return wrapper


def _run(run: Callable[[], None], off: bool) -> None:
    thread = LOCAL.thread
    with turn():
        _synchronize(thread)
    try:
        with casts_off() if off else contextlib.nullcontext():
            run()
    finally:
        for region in reversed(thread.regions):
            region.__exit__(None, None, None)
        thread.regions = ()
        with turn():
            _drop_hook()


# -- Backward passes ---------------------------------------------------------------------------------


def _without_casts(run_backward: Any) -> Any:
    @functools.wraps(run_backward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with casts_off():
            return run_backward(*args, **kwargs)

    return wrapper


def _with_casts(apply: Any) -> Any:
    @functools.wraps(apply)
    def wrapper(self: Any, *args: Any) -> Any:
        with casts_on():
            return apply(self, *args)

    return wrapper
