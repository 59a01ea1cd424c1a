"""What ran in a scope carries it: checkpoints, autograd Functions and threads get the forward's own.

Everything is kept where it is made, and put back from there. A checkpoint's recompute runs in the whole state
that its forward had. An autograd Function's context has the scopes that its call was made in, for the backward of
Functions that enter ``torch.autocast`` again by themselves, as ``torch.amp.custom_bwd`` and the checkpoints of
other libraries do.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from ..devices.registry import DEVICES
from ..engine.entries import Restoring
from ..engine.marks import Change, Mark, changes_to, set_dtype
from ..engine.resolving import mark_here, scopes_here
from ..engine.scope import MARK, PLAIN, THREAD, Scopes, graph_task
from ..torch_internals import (
    CHECKPOINT_GENERATOR,
    CHECKPOINT_SETTINGS,
    dispatch_tls_is_dispatch_key_excluded,
    dispatch_tls_set_dispatch_key_excluded,
)

__all__ = ["Carried", "carrying", "serve_autograd"]

R = TypeVar("R")

_is_excluded = dispatch_tls_is_dispatch_key_excluded
_set_excluded = dispatch_tls_set_dispatch_key_excluded


class Carried:
    """The calling thread's autocast state, of every device that regions have asked for, to be had again anywhere."""

    __slots__ = ("_cache", "_keep", "_mark", "_scopes", "_states")

    def __init__(self, *, keep: bool = False) -> None:
        self._keep = keep
        """Whether casts are kept as they are here; a recompute makes its own."""
        self._scopes: Scopes = scopes_here()
        self._mark: Mark = mark_here()
        self._cache = torch.is_autocast_cache_enabled()
        self._states = [(d.key, _is_excluded(d.key), d.type, torch.get_autocast_dtype(d.type)) for d in DEVICES]

    def restored(self) -> Restoring:
        """Return a context in which the calling thread has this state."""
        return Restoring(self._changes, self._cache)

    def _changes(self) -> list[Change]:
        put, task = THREAD.state.put, graph_task()
        changes: list[Change] = []
        for key, is_off, device_type, dtype in self._states:
            changes += [(_set_excluded, key, is_off), (set_dtype, device_type, dtype)]
        for index in range(len(DEVICES)):
            scope = self._scopes[index] if index < len(self._scopes) else None
            is_plain = scope is None or scope is PLAIN
            changes.append((put, index, PLAIN if is_plain else scope.again(task, keep=self._keep)))  # type: ignore[union-attr]
        return [*changes, (put, MARK, self._mark), *changes_to(self._mark)]


def carrying(function: Callable[..., R], *, keep: bool = False) -> Callable[..., R]:
    """Return ``function`` such that it runs, on any thread, in the state of here and now."""
    carried = Carried(keep=keep)

    @functools.wraps(function, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> R:
        with carried.restored():
            return function(*args, **kwargs)

    return wrapper


# -- torch's checkpoints and Functions -----------------------------------------------------------------


def serve_autograd() -> None:
    """Have torch's checkpoints and autograd Functions carry scopes; called once, at the first region."""
    from torch.autograd.function import BackwardCFunction
    from torch.utils import checkpoint

    BackwardCFunction.__init__ = _keep_scopes  # type: ignore[assignment]
    function: Any = checkpoint.CheckpointFunction
    function.forward = staticmethod(_reentrant(function.forward))
    setattr(*CHECKPOINT_SETTINGS, _settings(getattr(*CHECKPOINT_SETTINGS)))
    original, name = getattr(*CHECKPOINT_GENERATOR), CHECKPOINT_GENERATOR[1]
    replaced = _without_reentrant(original)
    for module in list(sys.modules.values()):  # others have it by name
        if getattr(module, "__dict__", {}).get(name) is original:
            vars(module)[name] = replaced


def _keep_scopes(ctx: Any, *args: Any) -> None:
    """Initialize an autograd Function's context."""
    ctx._mpamp_scopes = scopes_here()


def _reentrant(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        outputs = forward(ctx, run_function, *args)
        ctx.run_function = carrying(ctx.run_function)
        return outputs

    return wrapper


def _without_reentrant(generator: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
    """Return torch's generator such that the function it is given, which it only calls again, carries the state."""

    @functools.wraps(generator)
    def wrapper(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        return generator(carrying(fn), *args, **kwargs)

    return wrapper


def _settings(get: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's function such that it doesn't ask for a float32 region, which torch warns of: ours is put back."""

    @functools.wraps(get)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        found = get(*args, **kwargs)
        for settings in found:
            if settings is not None and settings["enabled"] and settings["dtype"] is torch.float32:
                settings["enabled"] = False
        return found

    return wrapper
