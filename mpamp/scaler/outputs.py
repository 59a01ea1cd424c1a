"""Scales what a model returns: tensors in containers of any depth, each container kept as it is."""

from __future__ import annotations

import copy
from collections import abc, deque
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

__all__ = ["map_tensors"]

_REBUILT = (list, tuple, set, frozenset, deque)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a copy of nested containers with a function applied to their tensors.

    Lists, tuples, named tuples, sets, deques and mappings keep their class, mappings their keys; of other
    iterables, such as generators, a lazy ``map`` comes back, as from torch.

    Raises:
        ValueError: Something in them is neither a tensor nor an iterable, or a container holds itself.

    Example:
        >>> import torch
        >>> map_tensors(lambda t: t * 2, {"loss": torch.tensor(1.0)})
        {'loss': tensor(2.)}
    """
    return _map(function, value, ())


def _map(function: Callable[[Tensor], Tensor], value: Any, around: tuple[Any, ...]) -> Any:
    """Map a value inside of the containers ``around`` it."""
    if isinstance(value, Tensor):
        return function(value)
    if any(value is container for container in around):
        raise ValueError(f"outputs can't be scaled: a {type(value).__name__} in them holds itself.")
    one = partial(_map, function, around=(*around, value))
    if isinstance(value, abc.Mapping):
        return _mapping_like(value, {key: one(item) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(map(one, value))
    if isinstance(value, _REBUILT):
        items = [one(item) for item in value]
        return deque(items, value.maxlen) if type(value) is deque else type(value)(items)
    if isinstance(value, abc.Iterable) and not isinstance(value, str | bytes):
        return map(one, value)
    raise ValueError(f"outputs must be a Tensor or an iterable of Tensors, got {type(value).__name__}.")


def _mapping_like(value: abc.Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if not isinstance(value, abc.MutableMapping):
        return type(value)(items)  # type: ignore[call-arg]
    # A copy keeps what else the class holds, such as a default factory or the attributes of a model's output.
    try:
        result = copy.copy(value)
        for key, item in items.items():
            result[key] = item
    except TypeError:  # it can only be made, not written to
        return type(value)(items)  # type: ignore[call-arg]
    return result
