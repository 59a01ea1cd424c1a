"""Regions on other threads: autocast state is per thread, and torch's DataParallel carries only part of it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..engine.resolving import scopes_here
from ..engine.scope import THREAD
from .carrying import Carried, carrying
from .decorating import decorate

__all__ = ["carried_apply", "inherit_regions", "serve_data_parallel"]

R = TypeVar("R")


def inherit_regions(function: Callable[..., R]) -> Callable[..., R]:
    """Return ``function`` such that it runs, on any thread, in the regions that are open here and now.

    Generators, async functions and async generators run in them at each step, and leave them where they pause. Of a
    class, instances are made in them.

    Raises:
        TypeError: It isn't callable, such as a coroutine, which is what an async function returns.

    Example:
        >>> import threading, torch, mpamp
        >>> a, seen = torch.ones(2, 2), []
        >>> def work():
        ...     seen.append((a @ a).dtype)
        >>> with mpamp.autocast("cpu", dtype=torch.bfloat16):
        ...     thread = threading.Thread(target=inherit_regions(work))
        ...     thread.start()
        ...     thread.join()
        >>> seen
        [torch.bfloat16]
    """
    if not callable(function):
        raise TypeError(f"inherit_regions takes a function, got {function!r}: give it what makes that when called.")
    if not _is_in_region():
        return function
    if isinstance(function, type):
        return carrying(function, keep=True)
    inherited: Callable[..., R] = decorate(function, Carried(keep=True).restored)
    return inherited


def _is_in_region() -> bool:
    return bool(THREAD.state.entries) or any(scope is not None for scope in scopes_here())


def carried_apply(parallel_apply: Callable[..., R]) -> Callable[..., R]:
    """Return torch's ``parallel_apply`` such that each of its threads runs in the caller's regions.

    torch enters autocast there by the enabled flag alone: dtype and op table would be lost.
    """

    @functools.wraps(parallel_apply)
    def carried(modules: Sequence[Callable[..., Any]], *args: Any, **kwargs: Any) -> R:
        if _is_in_region():
            modules = [carrying(module, keep=True) for module in modules]
        return parallel_apply(modules, *args, **kwargs)

    return carried


def serve_data_parallel() -> None:
    """Have DataParallel's replicas run in the regions that it is called in; called once, at the first region."""
    import torch.nn.parallel as parallel

    replaced = carried_apply(parallel.parallel_apply)
    parallel.parallel_apply = replaced
    sys.modules["torch.nn.parallel.data_parallel"].parallel_apply = replaced  # type: ignore[attr-defined]
