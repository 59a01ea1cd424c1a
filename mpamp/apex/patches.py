"""What is replaced for a while: attributes, counted and put back in reverse order, and objects' classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Patches", "passing_for", "set_class"]

_ABSENT = object()


class Patches:
    """A pile of replaced attributes.

    Example:
        >>> class Owner:
        ...     def f(self): return 1
        >>> patches = Patches()
        >>> patches.replace(Owner, "f", lambda f: lambda self: f(self) + 1)
        >>> Owner().f(), patches.names()
        (2, ['Owner.f'])
        >>> patches.withdraw()
        >>> Owner().f(), patches.names()
        (1, [])
    """

    def __init__(self) -> None:
        self._pile: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Replace an attribute of a module or class by ``wrap`` of what it is now."""
        before = vars(owner).get(name, _ABSENT)
        after = wrap(getattr(owner, name))
        setattr(owner, name, after)
        self._pile.append((owner, name, before, after))

    def withdraw(self) -> None:
        """Put everything back; what someone else has replaced since stays as it is."""
        while self._pile:
            owner, name, before, after = self._pile.pop()
            if vars(owner).get(name) is not after:
                continue
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def names(self) -> list[str]:
        """Return what is replaced now, oldest first."""
        return [f"{getattr(owner, '__name__', owner)}.{name}" for owner, name, _, _ in self._pile]


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
