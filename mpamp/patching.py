"""What is replaced in torch for a while, in layers: each can be taken away, whichever others lie on it or under it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .locks import LOCK

__all__ = ["Patches", "own_value"]

_MISSING = object()
Make = Callable[[Any], Any]


class _Layer:
    def __init__(self, make: Make, below: Any) -> None:
        self.make, self.value = make, make(below)


class _Place:
    """An attribute: what its owner has there itself, and the layers on it, lowest first."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.own = vars(owner).get(name, _MISSING)
        self.found = getattr(owner, name, None)
        """What is found there; it may be inherited."""
        self.layers: list[_Layer] = []

    @property
    def is_ours(self) -> bool:
        """Whether the highest layer is what stands there, and nothing that another has put over it."""
        return bool(self.layers) and vars(self.owner).get(self.name) is self.layers[-1].value

    def add(self, make: Make) -> _Layer:
        layer = _Layer(make, self.layers[-1].value if self.layers else self.found)
        setattr(self.owner, self.name, layer.value)
        self.layers.append(layer)
        return layer

    def remove(self, layer: _Layer) -> None:
        """Make the layers above anew, over what is under it; what another has put over all stays as it is."""
        is_ours, at = self.is_ours, self.layers.index(layer)
        del self.layers[at]
        if not is_ours:
            return
        below = self.layers[at - 1].value if at else self.found
        for above in self.layers[at:]:
            below = above.value = above.make(below)
        if self.layers:
            setattr(self.owner, self.name, below)
        elif self.own is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.own)


_places: dict[tuple[int, str], _Place] = {}
"""Those with a layer."""


def own_value(owner: Any, name: str) -> Any:
    """Return what a module or class has itself by a name, under all layers; None where it has nothing."""
    with LOCK:
        place = _places.get((id(owner), name))
        found = vars(owner).get(name) if place is None or not place.is_ours else place.own
        return None if found is _MISSING else found


class Patches:
    """Attributes that are replaced together; ``undo`` takes them away again.

    Example:
        >>> class Owner:
        ...     def f(self): return 1
        >>> own, add, double = Owner.f, Patches(), Patches()
        >>> add.wrap(Owner, "f", lambda below: lambda self: below(self) + 1)
        >>> double.wrap(Owner, "f", lambda below: lambda self: below(self) * 2)
        >>> Owner().f()
        4
        >>> add.undo()
        >>> Owner().f()
        2
        >>> double.undo()
        >>> Owner.f is own
        True
    """

    def __init__(self) -> None:
        self._layers: list[tuple[_Place, _Layer]] = []

    def __bool__(self) -> bool:
        return bool(self._layers)

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a module or a class; what it inherits is covered and not touched."""
        self._add(owner, name, lambda _: value)

    def wrap(self, owner: Any, name: str, make: Make) -> None:
        """Replace a function by what ``make`` returns for it; asked again where what lies under it changes."""
        if not hasattr(owner, name):
            raise AttributeError(f"{owner!r} has no {name!r}")
        self._add(owner, name, make)

    def _add(self, owner: Any, name: str, make: Make) -> None:
        with LOCK:
            place = _places.get((id(owner), name))
            if place is None or not place.is_ours:  # what another has put over ours is what is found
                place = _Place(owner, name)
            self._layers.append((place, place.add(make)))
            _places[id(owner), name] = place

    def undo(self) -> None:
        """Take everything away, last first. What another has put over it stays, and then has it still."""
        with LOCK:
            while self._layers:
                place, layer = self._layers.pop()
                place.remove(layer)
                if not place.layers and _places.get((id(place.owner), place.name)) is place:
                    del _places[id(place.owner), place.name]

    def names(self) -> list[str]:
        """Return what is replaced now, oldest first."""
        return [f"{getattr(place.owner, '__name__', place.owner)}.{place.name}" for place, _ in self._layers]
