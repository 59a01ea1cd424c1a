"""Regions on other threads: autocast state is per thread, and torch's DataParallel carries only part of it."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .scope import THREAD

__all__ = ["carrying", "inherit_regions", "serve_data_parallel"]

R = TypeVar("R")


def inherit_regions(function: Callable[..., R]) -> Callable[..., R]:
    """Return ``function`` such that it runs, on any thread, in the regions that are open here and now.

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
    regions = [entry[0] for entry in THREAD.state.entries]

    @functools.wraps(function, updated=())
    def inheriting(*args: Any, **kwargs: Any) -> R:
        with contextlib.ExitStack() as stack:
            for region in regions:
                stack.enter_context(region)
            return function(*args, **kwargs)

    return inheriting


def carrying(parallel_apply: Callable[..., R]) -> Callable[..., R]:
    """Return torch's ``parallel_apply`` such that each of its threads runs in the caller's regions.

    torch enters autocast there by the enabled flag alone: dtype and op table would be lost.
    """

    @functools.wraps(parallel_apply)
    def carried(modules: Sequence[Callable[..., Any]], *args: Any, **kwargs: Any) -> R:
        if THREAD.state.entries:
            modules = [inherit_regions(module) for module in modules]
        return parallel_apply(modules, *args, **kwargs)

    return carried


def serve_data_parallel() -> None:
    """Have DataParallel's replicas run in the regions that it is called in; called once, at the first region."""
    import torch.nn.parallel as parallel

    replaced = carrying(parallel.parallel_apply)
    parallel.parallel_apply = replaced
    sys.modules["torch.nn.parallel.data_parallel"].parallel_apply = replaced  # type: ignore[attr-defined]
