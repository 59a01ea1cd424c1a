"""Seeing an optimizer's steps, whatever kind of object it is and whoever replaces its ``step``, before or after.

torch's step hooks reach what torch's own constructor has prepared, and no ``step`` that was put on the object.
An attribute put on the object ends with the next one that is put there. So the object gets a class of its own, a
subclass of its class, whose ``step`` is found before any other: it runs whichever is the object's step at that time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch

from .classes import passing_for, set_class
from .errors import AmpUsageError

__all__ = ["Around", "Watch", "was_called"]

Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""What runs in place of a step: it is given the step, its arguments and its keyword arguments."""

_ABSENT = object()


class Watch:
    """One optimizer's steps, watched until ``stop``.

    Args:
        optimizer: Any object with a ``step``.
        around: Runs in place of each step, those within another included.
        attributes: Further attributes of the class that the optimizer gets.

    Raises:
        AmpUsageError: The object's class can't be replaced, or its ``step`` isn't found through it.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
        >>> watch = Watch(optimizer, lambda step, args, kwargs: "seen")
        >>> optimizer.step = lambda: "replaced"
        >>> optimizer.step()
        'seen'
        >>> watch.stop()
        >>> optimizer.step()
        'replaced'
    """

    def __init__(self, optimizer: Any, around: Around, attributes: Mapping[str, Any] | None = None) -> None:
        self.optimizer, self.around = optimizer, around
        self.cls: type = type(optimizer)
        self.is_on = True
        self._made: Any = None
        self._found: Any = None
        self._function: Any = None
        try:
            self._made = _subclass(self.cls, {**(attributes or {}), "step": _Step(self)})
            set_class(optimizer, self._made)
            if type(optimizer) is not self._made or optimizer.step.__func__ is not self._function:
                raise TypeError("its step isn't found through its class")
        except Exception as error:
            self.stop()
            raise AmpUsageError(
                f"amp can't see the steps of a {self.cls.__module__}.{self.cls.__qualname__} ({error}), so it could "
                "neither skip one nor carry it over to the model. Pass amp.initialize the optimizer inside of it, or a "
                "plain object with param_groups and step()."
            ) from error

    def stop(self) -> None:
        """Give the optimizer its own class back; again does nothing."""
        self.is_on = False
        if type(self.optimizer) is self._made:
            set_class(self.optimizer, self.cls)

    # -- What the class's ``step`` does ----------------------------------------------------------------

    def method(self, optimizer: Any) -> MethodType:
        """Return the optimizer's step as it is now, through ``around``."""
        found, bind = self._find(optimizer)
        if self._function is None or found is not self._found:
            self._found, self._function = found, self._through(found, bind)
        return MethodType(self._function, optimizer)

    def _through(self, found: Any, bind: Callable[[Any], Any]) -> Any:
        @functools.wraps(found)
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            inner = bind(optimizer)
            return self.around(inner, args, kwargs) if self.is_on else inner(*args, **kwargs)

        # Of what has been disabled before, wraps copies this too: torch before 2.11 would follow it past this step.
        vars(step).pop("_torchdynamo_orig_callable", None)
        return torch.compiler.disable(step, recursive=False)  # compiled code calls it as it is

    def _find(self, optimizer: Any) -> tuple[Any, Callable[[Any], Any]]:
        """Return what ``optimizer.step`` would be by Python's rules without this class, and what binds it."""
        in_class = self._in_class()
        own = _own(optimizer).get("step", _ABSENT)
        if own is not _ABSENT and not hasattr(type(in_class), "__set__"):
            return own, lambda _: own
        if in_class is _ABSENT:
            given = self.cls.__getattr__(optimizer, "step")  # type: ignore[attr-defined]
            return given, lambda _: given
        if hasattr(type(in_class), "__get__"):
            return in_class, lambda optimizer: in_class.__get__(optimizer, self.cls)
        return in_class, lambda _: in_class

    def _in_class(self) -> Any:
        return next((vars(cls)["step"] for cls in self.cls.__mro__ if "step" in vars(cls)), _ABSENT)

    def replace(self, optimizer: Any, *value: Any) -> None:
        """Set the optimizer's own step, or delete it, as its own class would."""
        in_class = self._in_class()
        if hasattr(type(in_class), "__set__"):
            (in_class.__set__ if value else in_class.__delete__)(optimizer, *value)
        elif value:
            _own(optimizer, "step")["step"] = value[0]
        elif _own(optimizer).pop("step", _ABSENT) is _ABSENT:
            raise AttributeError("step")


class _Step:
    """A data descriptor, which Python asks before the object's own attributes."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __get__(self, optimizer: Any, owner: type | None = None) -> Any:
        return self._watch.cls.step if optimizer is None else self._watch.method(optimizer)  # type: ignore[attr-defined]

    def __set__(self, optimizer: Any, value: Any) -> None:
        self._watch.replace(optimizer, value)

    def __delete__(self, optimizer: Any) -> None:
        self._watch.replace(optimizer)


def _own(optimizer: Any, needed: str = "") -> dict[str, Any]:
    """Return an object's own attributes, past what its class makes of them."""
    try:
        found: dict[str, Any] = object.__getattribute__(optimizer, "__dict__")
    except AttributeError:
        if needed:
            raise AttributeError(f"{type(optimizer).__name__!r} object attribute {needed!r} is read-only") from None
        return {}
    return found


def _subclass(cls: Any, body: dict[str, Any]) -> Any:
    """Return a subclass that passes for its base: by name, in copies and pickles, and where ``step`` is set on it."""

    def set_on_class(made: Any, name: str, value: Any) -> None:
        if isinstance(vars(made).get(name), _Step):
            setattr(cls, name, value)
        else:
            type.__setattr__(made, name, value)

    def reduce_ex(self: Any, protocol: Any) -> Any:
        reduced = super(made, self).__reduce_ex__(protocol)
        if isinstance(reduced, tuple) and len(reduced) > 1:
            arguments = tuple(cls if argument is made else argument for argument in reduced[1])
            return (cls if reduced[0] is made else reduced[0], arguments, *reduced[2:])
        return reduced

    meta = type(type(cls).__name__, (type(cls),), {"__setattr__": set_on_class})
    made = meta(cls.__name__, (cls,), {**body, **passing_for(cls), "__slots__": (), "__reduce_ex__": reduce_ex})
    return made


def was_called(optimizer: Any) -> None:
    """Have a learning rate scheduler that counts an optimizer's steps take one that was skipped for called."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        optimizer._opt_called = True
