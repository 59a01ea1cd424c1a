"""One device's autocast state, kept to run something in it later, on any thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..devices.registry import device_state, devices_in_use
from ..engine.compiling import Contexts, is_compiling, is_dynamo_compiling, run_while_tracing, traced
from ..engine.entries import Restoring
from ..engine.marks import NO_MARK, Change, changes_to, compose_mark, set_dtype
from ..engine.resolving import mark_here, resolve
from ..engine.scope import MARK, PLAIN, THREAD, Scope, graph_task
from ..rules.optable import OpTable
from ..torch_internals import dispatch_tls_set_dispatch_key_excluded, register_constant
from .programs import contexts_of

__all__ = ["DeviceAutocast", "run_in", "run_without", "scope_now"]

_set_excluded = dispatch_tls_set_dispatch_key_excluded


def scope_now(device_type: str) -> Scope | None:
    """Return the scope that ops of a device run in here and now; None outside of mpamp's regions.

    Example:
        >>> import mpamp
        >>> with mpamp.autocast("cpu"):
        ...     scope_now("cpu").table.device
        'cpu'
        >>> scope_now("cpu") is None
        True
    """
    device = next((d for d in devices_in_use() if d.type == device_type), None)
    return None if device is None else resolve(device)


@dataclass(unsafe_hash=True, slots=True)  # never changed; torch 2.8's Dynamo takes no frozen one
class DeviceAutocast:
    """Whether ops of one device are autocast, to which dtype, and by which of mpamp's scopes, if any."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    scope: Scope | None = None

    @classmethod
    def now(cls, device_type: str, *, is_off: bool = False) -> DeviceAutocast:
        """Return the calling thread's state; ``is_off`` keeps the dtype and says that nothing is autocast."""
        dtype = torch.get_autocast_dtype(device_type)
        enabled = not is_off and torch.is_autocast_enabled(device_type)
        return cls(
            device_type, enabled, dtype, scope_now(device_type) if enabled and not is_dynamo_compiling() else None
        )

    def restored(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the calling thread has this state."""
        if is_dynamo_compiling() and self.enabled and self.scope is not None:
            return traced(_contexts(self))  # compiled autograd traces the backward of an eager forward
        if is_dynamo_compiling() or (not self.enabled and is_compiling()):
            return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled)
        if not self.enabled:
            return _off(self.device_type, self.dtype)
        return _plain(self.device_type, self.dtype) if self.scope is None else Restoring(self._changes, False)

    def own_table(self) -> OpTable | None:
        """Return the scope's table where it isn't the device's default of now."""
        table = None if self.scope is None else self.scope.table
        return None if table is device_state(self.device_type).table else table

    def _changes(self) -> list[Change]:
        assert self.scope is not None
        device, put, scope = device_state(self.device_type), THREAD.state.put, self.scope.again(graph_task(), keep=True)
        mark = compose_mark(mark_here(), device.type, self.own_table())
        changes: list[Change] = [(put, device.index, scope), (put, MARK, mark), *changes_to(mark)]
        return [*changes, (set_dtype, device.type, self.dtype), (_set_excluded, device.key, False)]


register_constant(DeviceAutocast)


@run_while_tracing
def _contexts(state: DeviceAutocast) -> Contexts:
    return contexts_of(device_state(state.device_type), state.own_table(), state.dtype)


def run_in(states: tuple[DeviceAutocast, ...], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call ``function`` in the state of each device; other devices keep the one they have."""
    if not states:
        return function(*args, **kwargs)
    with states[0].restored():
        return run_in(states[1:], function, args, kwargs)


def run_without(device_types: tuple[str, ...], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call ``function`` with autocast off on these devices."""
    if not device_types:
        return function(*args, **kwargs)
    name = device_types[0]
    with torch.autocast(name, enabled=False) if is_compiling() else _off(name):
        return run_without(device_types[1:], function, args, kwargs)


@contextlib.contextmanager
def _off(device_type: str, dtype: torch.dtype | None = None) -> Iterator[None]:
    # A disabled torch.autocast would warn about dtypes that it doesn't use, and drop torch's kept casts.
    was_enabled, was_dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, False)
    set_dtype(device_type, was_dtype if dtype is None else dtype)
    try:
        yield
    finally:
        set_dtype(device_type, was_dtype)
        torch.set_autocast_enabled(device_type, was_enabled)


@contextlib.contextmanager
def _plain(device_type: str, dtype: torch.dtype) -> Iterator[None]:
    """Be in a region of torch's own, and in none of mpamp's."""
    with Restoring(_none_of_ours, True), torch.autocast(device_type, dtype=dtype, cache_enabled=True):
        yield


def _none_of_ours() -> list[Change]:
    put = THREAD.state.put
    return [*((put, device.index, PLAIN) for device in devices_in_use()), (put, MARK, NO_MARK), *changes_to(NO_MARK)]
