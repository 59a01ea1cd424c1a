"""Tensors inside nested arguments: finding them, and replacing them in containers that keep their class."""

from __future__ import annotations

import array
import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence
from types import MappingProxyType
from typing import Any

import torch

from ..engine.compiling import is_compiling, run_while_tracing

__all__ = ["autocast_types", "has_autocast", "map_tensors", "mapping_like", "sequence_like", "tensors_in"]

Tensor = torch.Tensor
_LOOKED_INTO = (list, tuple, dict, Mapping, MutableSequence)  # a union of classes can't be compiled by torch 2.8
_NUMBERS = (bytearray, array.array)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested sequences and mappings; other objects, and modules, are not looked into.

    A container that holds itself is looked into once.

    Example:
        >>> len(tensors_in([torch.ones(1), {"a": (torch.ones(1), 2)}, "b"]))
        2
    """
    found: list[Tensor] = []
    _find(value, found, _nothing())
    return found


def _nothing() -> set[int] | None:
    """Return what keeps the ids of the containers around an item; None while compiling: ids are none there."""
    return None if is_compiling() else set()


def _find(value: Any, found: list[Tensor], outer: set[int] | None) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif is_container(value) and _enter(value, outer):
        for item in list(value.values()) if isinstance(value, Mapping) else value:
            if not _is_leaf(item):
                _find(item, found, outer)
        _leave(value, outer)


def _enter(value: Any, outer: set[int] | None) -> bool:
    """Go into a container, unless it surrounds itself."""
    if outer is None:
        return True
    if id(value) in outer:
        return False
    outer.add(id(value))
    return True


def _leave(value: Any, outer: set[int] | None) -> None:
    if outer is not None:
        outer.discard(id(value))


def _is_leaf(value: Any) -> bool:
    return value is None or isinstance(value, (int, float, str))


def is_container(value: Any) -> bool:
    """Tell whether tensors in an argument are looked for."""
    return isinstance(value, _LOOKED_INTO) and not isinstance(value, _NUMBERS)


def map_tensors(value: Any, function: Callable[[Tensor], Any], where: Callable[[Tensor], bool]) -> Any:
    """Return ``value`` with ``function`` applied to those tensors in nested sequences and mappings.

    Containers keep their class (named tuples, ``OrderedDict``, ``defaultdict``, ``deque``, read-only ones,
    subclasses), their order and the keys as they are; one without such a tensor is returned itself, and so is
    one that can't be made anew with other items, or that holds itself. Everything else passes through: strings,
    arrays, sets, iterators, modules, dataclasses, any other object.

    Args:
        value: Anything.
        function: What to do with a tensor.
        where: Which tensors to do it with.

    Example:
        >>> batch = {"x": torch.ones(1), "name": "a"}
        >>> map_tensors(batch, torch.Tensor.double, torch.is_floating_point)
        {'x': tensor([1.], dtype=torch.float64), 'name': 'a'}
        >>> map_tensors(batch, torch.Tensor.double, torch.is_complex) is batch
        True
    """
    return _map(value, function, where, _nothing())[0]


def _map(
    value: Any, function: Callable[[Tensor], Any], where: Callable[[Tensor], bool], outer: set[int] | None
) -> tuple[Any, bool]:
    """Return what becomes of a value, and whether that is anything else: Dynamo can't compare tuples by identity."""
    if isinstance(value, Tensor):
        is_wanted = where(value)
        return (function(value), True) if is_wanted else (value, False)
    if not is_container(value) or not _enter(value, outer):
        return value, False
    items, changed = [], False
    for item in list(value.values()) if isinstance(value, Mapping) else value:
        new, is_new = (item, False) if _is_leaf(item) else _map(item, function, where, outer)
        items.append(new)
        changed = changed or is_new
    _leave(value, outer)
    if not changed:
        return value, False
    if isinstance(value, Mapping):
        return mapping_like(value, dict(zip(value.keys(), items, strict=True))), True
    return sequence_like(value, items), True


# -- Containers made anew ----------------------------------------------------------------------------


def sequence_like(value: Any, items: list[Any]) -> Any:
    """Return a sequence of the class of ``value`` with other items; ``value`` where that can't be made."""
    cls = type(value)
    if cls is list:
        return items
    if cls is tuple:
        return tuple(items)
    if hasattr(cls, "_make"):
        return cls._make(items)
    if hasattr(cls, "n_fields"):  # what torch.max and its like return
        return cls(items)
    if isinstance(value, tuple):
        made = tuple.__new__(cls, items)
        _take_attributes(made, value)
        return made
    if isinstance(value, list):
        made = _copied(value, list)
        list.__setitem__(made, slice(None), items)
        return made
    with contextlib.suppress(Exception):
        made = copy.copy(value)
        for index, item in enumerate(items):
            made[index] = item
        return made if _holds(made, items) else value
    return value


def mapping_like(value: Any, items: dict[Any, Any]) -> Any:
    """Return a mapping of the class of ``value`` with other values at its keys; ``value`` where that can't be made."""
    cls = type(value)
    if cls is dict:
        return items
    if cls is MappingProxyType:
        return MappingProxyType(items)
    if isinstance(value, dict):
        made = _copied(value, dict)
        for key, item in items.items():
            try:
                made[key] = item  # first, for a class may keep attributes beside its items
            except Exception:
                dict.__setitem__(made, key, item)
        return made
    with contextlib.suppress(Exception):
        made = copy.copy(value)
        if isinstance(value, MutableMapping):
            for key, item in items.items():
                made[key] = item
        else:
            _replace_in_attributes(made, value, items)
        return made if _holds([made[key] for key in items], list(items.values())) else value
    return value


def _holds(found: Iterable[Any], items: list[Any]) -> bool:
    return all(a is b for a, b in zip(found, items, strict=True))


def _replace_in_attributes(made: Any, value: Any, items: dict[Any, Any]) -> None:
    """Replace the items of a read-only mapping in the containers that it keeps them in."""
    new = {id(value[key]): item for key, item in items.items()}

    def replaced(inner: Any) -> Any:
        if isinstance(inner, Mapping) and any(id(item) in new for item in inner.values()):
            return mapping_like(inner, {key: new.get(id(item), item) for key, item in inner.items()})
        if isinstance(inner, list | tuple) and any(id(item) in new for item in inner):
            return sequence_like(inner, [new.get(id(item), item) for item in inner])
        return new.get(id(inner), inner)

    for name, held in _attributes(value).items():
        object.__setattr__(made, name, replaced(held))


def _copied(value: Any, base: type) -> Any:
    """Return a shallow copy; one made without the class's own code where that raises."""
    made: Any = None
    with contextlib.suppress(Exception):
        made = copy.copy(value)
        if type(made) is type(value) and made is not value and len(made) == len(value):
            return made
    made = base.__new__(type(value))  # type: ignore[call-overload]
    (list.extend if base is list else dict.update)(made, value)
    _take_attributes(made, value)
    return made


def _take_attributes(made: Any, value: Any) -> None:
    for name, held in _attributes(value).items():
        object.__setattr__(made, name, held)


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, those in slots too."""
    slots = [name for cls in type(value).__mro__ for name in _names(vars(cls).get("__slots__", ()))]
    in_slots = {name: getattr(value, name) for name in slots if name[:2] != "__" and hasattr(value, name)}
    return {**in_slots, **getattr(value, "__dict__", {})}


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


@run_while_tracing  # torch 2.8 can't compile it
def has_autocast(device_type: str) -> bool:
    """Tell whether torch has autocast state for a device type, so not for ``meta``.

    Example:
        >>> has_autocast("cpu"), has_autocast("meta")
        (True, False)
    """
    return torch.amp.is_autocast_available(device_type)


def autocast_types(tensors: Iterable[Tensor]) -> tuple[str, ...]:
    """Return the device types of the tensors that can be autocast, each once, in order of first sight.

    Example:
        >>> autocast_types([torch.ones(1), torch.ones(1, device="meta")])
        ('cpu',)
    """
    found: list[str] = []
    for tensor in tensors:
        if tensor.device.type not in found and has_autocast(tensor.device.type):
            found.append(tensor.device.type)
    return tuple(found)
