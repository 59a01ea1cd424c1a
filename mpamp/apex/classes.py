"""Classes that objects are given for a while: ours, which pass for the ones that they stand for."""

from __future__ import annotations

from typing import Any

__all__ = ["passing_for", "set_class"]

_CLASS: Any = vars(object)["__class__"]


def set_class(value: Any, cls: type) -> None:
    """Give an object another class, past what its own makes of that."""
    _CLASS.__set__(value, cls)


def passing_for(cls: type) -> dict[str, Any]:
    """Return what makes a subclass pass for ``cls``: its names, and the ``__class__`` of its objects.

    With that ``super(self.__class__, self)``, wrong as it is, still ends, and pickles are of ``cls``.
    """
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    passed = property(lambda self: cls if vars(type(self)).get("__class__") is passed else type(self), set_class)
    return {**names, "__class__": passed}
