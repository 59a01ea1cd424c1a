"""What a plugin's backend raises is named: whose it is, and what it was asked."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch

from ..errors import PluginLoadError
from ..probing import probing
from .backend import Backend

__all__ = ["guarded", "interview"]

Told = Callable[[str, BaseException], str]
_LATER = ("op_table", "prepare")
"""Methods that have their own time: when the device's tables are made, and before the first kernel is."""
_FUNCTIONS = ("capture_check", "tensor_check")
"""Methods that give functions which are called per op: asked once, before any lock is held."""

_OF_TENSORS = ("read_later",)
"""Methods that are given tensors of the caller's program."""


def guarded(backend: Backend, told: Told) -> Backend:
    """Return ``backend``, such that it raises ``PluginLoadError`` alone: whatever it raises is the cause.

    KeyboardInterrupt goes through, for it is the user's.

    Args:
        backend: A plugin's.
        told: Takes note of what was asked and of what was raised, and returns what is to be said of it.
    """
    return cast(Backend, _Guarded(backend, told))


def interview(backend: Backend) -> None:
    """Ask a backend all that can be asked without a tensor of its device: what raises should before it is in use.

    Raises:
        PluginLoadError: Something did, of a guarded one.
    """
    repr(backend)
    answers: dict[str, tuple[Any, ...]] = {
        "dtype": tuple(backend.lower_precision_dtypes),
        "op": ("aten::_amp_update_scale_",),
    }
    for name, member in vars(Backend).items():
        if name.startswith("_") or name in _LATER:
            continue
        asked = getattr(backend, name)
        parameters = list(inspect.signature(member).parameters)[1:] if inspect.isfunction(member) else None
        if parameters == []:
            asked()
        elif parameters is not None and len(parameters) == 1:
            for answer in answers.get(parameters[0], ()):
                asked(answer)
    backend.tensor_check()(torch.empty(0))


class _Guarded:
    """Stands for a backend. ``isinstance`` takes it for one of the backend's own class."""

    def __init__(self, backend: Backend, told: Told) -> None:
        self.__dict__.update(own=backend, told=told)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.own)

    def __getattr__(self, name: str) -> Any:
        with _Naming(self.told, name):
            value = getattr(self.own, name)
        if not callable(value):
            return value
        call = _named(value if name in _OF_TENSORS else _outside(value), self.told, f"{name}()")
        self.__dict__[name] = functools.cache(call) if name in _FUNCTIONS else call
        return self.__dict__[name]

    def __repr__(self) -> str:
        with _Naming(self.told, "__repr__()"):
            return repr(self.own)


def _outside(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that runs outside of the caller's program; the functions that it returns run in that."""

    @functools.wraps(method, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        with probing():
            return method(*args, **kwargs)

    return call


class _Naming:
    """Turns what is raised inside into a ``PluginLoadError`` that says what was asked."""

    def __init__(self, told: Told, asked: str) -> None:
        self.told, self.asked = told, asked

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, KeyboardInterrupt):
            raise PluginLoadError(self.told(self.asked, error)) from error


def _named(function: Callable[..., Any], told: Told, asked: str) -> Callable[..., Any]:
    naming = _Naming(told, asked)

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        with naming:
            result = function(*args, **kwargs)
        return _named(result, told, f"{asked}()") if callable(result) else result

    return call
