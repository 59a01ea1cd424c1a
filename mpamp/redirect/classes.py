"""Classes that stand for torch's own where those can't be changed: calls are ours, all else is theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["stand_in"]


class _StandIn(type):
    """The class of classes whose instances are another's."""

    _original: type
    _make: Callable[..., Any]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._make(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls._original)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return subclass is cls or issubclass(subclass, cls._original)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls._original

    def __hash__(cls) -> int:  # tables of types, such as those of pickle and pytree, find either
        return hash(cls._original)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls._original, name)


def stand_in(original: type, make: Callable[..., Any]) -> type:
    """Return a class that is ``original`` for isinstance, tables and pickle, and calls ``make``.

    Example:
        >>> Even = stand_in(int, lambda value: int(value) // 2 * 2)
        >>> Even(5), isinstance(5, Even), Even == int
        (4, True, True)
    """
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    return _StandIn(original.__name__, (), {"_original": original, "_make": staticmethod(make), **names})
