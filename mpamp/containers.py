"""Tensors inside nested arguments: finding them, and replacing them in containers that keep their class."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch

from .compiling import run_while_tracing

__all__ = ["autocast_types", "has_autocast", "map_tensors", "mapping_like", "sequence_like", "tensors_in"]

Tensor = torch.Tensor
_SEQUENCES = (list, tuple)  # a union of classes can't be compiled by torch 2.8


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and mappings; other objects are not looked into.

    Example:
        >>> len(tensors_in([torch.ones(1), {"a": (torch.ones(1), 2)}, "b"]))
        2
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, MutableMapping):
        return tensors_in(list(value.values()))
    return [t for item in value for t in tensors_in(item)] if isinstance(value, _SEQUENCES) else []


def map_tensors(value: Any, function: Callable[[Tensor], Any], where: Callable[[Tensor], bool]) -> Any:
    """Return ``value`` with ``function`` applied to those tensors in nested lists, tuples and mappings.

    Containers keep their class (named tuples, ``OrderedDict``, ``defaultdict``, subclasses), their order and
    the keys as they are; one without such a tensor is returned itself. Everything else passes through:
    strings, arrays, sets, iterators, dataclasses, any other object.

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
    if isinstance(value, Tensor):
        return function(value) if where(value) else value
    if not any(where(tensor) for tensor in tensors_in(value)):
        return value
    if isinstance(value, MutableMapping):
        return mapping_like(value, {key: map_tensors(item, function, where) for key, item in value.items()})
    return sequence_like(value, [map_tensors(item, function, where) for item in value])


def sequence_like(value: Any, items: list[Any]) -> Any:
    """Return a list or tuple of the class of ``value`` with other items."""
    cls = type(value)
    if cls is list:
        return items
    if cls is tuple:
        return tuple(items)
    if hasattr(cls, "_make"):
        return cls._make(items)
    if isinstance(value, list):
        changed = copy.copy(value)
        changed[:] = items
        return changed
    if hasattr(cls, "n_fields"):  # what torch.max and its like return
        return cls(items)
    made = tuple.__new__(cls, items)
    vars(made).update(vars(value))
    return made


def mapping_like(value: Any, items: dict[Any, Any]) -> Any:
    """Return a mapping of the class of ``value`` with other values at its keys."""
    if type(value) is dict:
        return items
    made = copy.copy(value)
    for key, item in items.items():
        made[key] = item
    return made


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
