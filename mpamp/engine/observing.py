"""Watching the engine: what each call of an op was given, what was cast for it, and what it gave back.

Off, nothing of this is in any kernel. While somebody observes, kernels are written with lines that tell, and ops
that torch's own kernels serve, or none, have one of ours that does as those do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from time import perf_counter_ns
from types import TracebackType
from typing import Any, NamedTuple

import torch

from ..devices.state import DeviceState
from ..locks import LOCK
from ..rules.policy import CastPolicy
from .scope import Scope, graph_task, mode_depth

__all__ = [
    "OBSERVERS",
    "Call",
    "Cast",
    "Observation",
    "Observer",
    "Observers",
    "is_inside_unlisted",
    "telling_call",
    "telling_cast",
]


class Cast(NamedTuple):
    """One argument that an op got in another dtype than it was called with."""

    before: torch.Tensor
    after: torch.Tensor
    is_kept: bool
    """Whether the cast is one that the cache keeps."""
    was_there: bool
    """Whether the cache had it: nothing was cast then."""


class Call:
    """One call of an op in a region, as its kernel saw it; observers are given it once the op is over.

    It holds tensors: take what is needed of it, and let it go.
    """

    __slots__ = (
        "arguments",
        "cast_ns",
        "casts",
        "depth",
        "device",
        "lower",
        "modes",
        "ns",
        "op",
        "policy",
        "result",
        "scope",
        "started",
        "task",
        "weights",
    )

    def __init__(
        self,
        op: str,
        device: DeviceState,
        scope: Scope,
        policy: CastPolicy | None,
        lower: torch.dtype,
        arguments: tuple[Any, ...],
    ) -> None:
        self.op, self.device, self.scope, self.policy, self.lower = op, device, scope, policy, lower
        self.arguments = [t for a in arguments for t in (a if isinstance(a, list | tuple) else (a,))]
        """The tensors that the op was called with, those of lists among them; numbers and None where one may stand."""
        self.casts: list[Cast] = []
        self.weights: dict[int, bool] = {}
        """The arguments, by id, that the cache gave a cast of, and whether it was there before."""
        self.result: Any = None
        self.modes = mode_depth()
        self.task = graph_task()
        self.cast_ns = self.ns = 0
        """What the host was busy for, in nanoseconds: with the casts, and with the call as a whole."""
        self.depth = len(_STACK.calls)
        _STACK.calls.append(self)
        self.started = perf_counter_ns()

    def ready(self, arguments: Iterable[Any]) -> None:
        """Take down what the op is about to be called with."""
        self.cast_ns = perf_counter_ns() - self.started
        now = [t for a in arguments for t in (a if isinstance(a, list | tuple) else (a,))]
        for before, after in zip(self.arguments, now, strict=True):
            if after is not before and isinstance(before, torch.Tensor) and before.dtype is not after.dtype:
                was_there = self.weights.get(id(before))
                self.casts.append(Cast(before, after, was_there is not None, bool(was_there)))

    def done(self, result: Any) -> Any:
        """Take down what the op gave back, tell the observers, and return it."""
        self.ns = perf_counter_ns() - self.started
        self.result = result
        for observation in OBSERVERS.all:
            observation.observer(self)
        return result

    def leave(self) -> None:
        """Be over; an op that gave nothing back raised, as recomputes do once they have all that they need."""
        del _STACK.calls[self.depth :]
        if not self.ns:
            self.done(None)


class _Stack(threading.local):
    def __init__(self) -> None:
        self.calls: list[Call] = []


_STACK = _Stack()


def is_inside_unlisted() -> bool:
    """Tell whether the calling thread is in a call, told of, that its table gave no policy."""
    return bool(_STACK.calls) and _STACK.calls[-1].policy is None


def telling_cast(kept: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function that gives a weight's kept cast such that it says which were there before."""

    def tell(tensor: torch.Tensor, target: torch.dtype, cache: Any) -> torch.Tensor:
        made = cache.casts
        found = kept(tensor, target, cache)
        if found is not tensor:
            _STACK.calls[-1].weights[id(tensor)] = cache.casts == made
        return found

    return tell


def telling_call(call: Callable[..., Any], slots: list[tuple[int, str | None]]) -> Callable[..., Any]:
    """Return ``call`` such that it says first what it is called with.

    Args:
        call: What runs an op once its arguments are cast.
        slots: Where its tensors are: each one's position, and its keyword if it has no position.
    """

    def tell(*args: Any, **kwargs: Any) -> Any:
        _STACK.calls[-1].ready(args[i] if name is None else kwargs[name] for i, name in slots)
        return call(*args, **kwargs)

    return tell


# -- Who observes ----------------------------------------------------------------------------------------

Observer = Callable[[Call], None]


class Observers:
    """All who observe; the engine is told when the first one comes, and when the last one has gone."""

    def __init__(self) -> None:
        self.all: tuple[Observation, ...] = ()
        self.changed: list[Callable[[], None]] = []
        """Called, with the lock held, when observing begins or ends."""

    def set(self, observers: tuple[Observation, ...]) -> None:
        """Replace who observes."""
        with LOCK:
            before, self.all = self.all, observers
            if bool(before) is not bool(observers):
                for tell in self.changed:
                    tell()


OBSERVERS = Observers()


class Observation:
    """One observer's time: from when it is made until ``close``; a context manager that closes it."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        with LOCK:
            OBSERVERS.set((*OBSERVERS.all, self))

    def close(self) -> None:
        """Observe no more; a second call does nothing."""
        with LOCK:
            OBSERVERS.set(tuple(o for o in OBSERVERS.all if o is not self))

    def __enter__(self) -> Observation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
