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
        ValueError: Something in them is neither a tensor nor an iterable.

    Example:
        >>> import torch
        >>> map_tensors(lambda t: t * 2, {"loss": torch.tensor(1.0)})
        {'loss': tensor(2.)}
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, abc.Mapping):
        return _map_mapping(function, value)
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(map_tensors(function, item) for item in value)
    if isinstance(value, _REBUILT):
        return _map_items(function, value)
    if isinstance(value, abc.Iterable) and not isinstance(value, str | bytes):
        return map(partial(map_tensors, function), value)
    raise ValueError(f"outputs must be a Tensor or an iterable of Tensors, got {type(value).__name__}.")


def _map_items(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    items = [map_tensors(function, item) for item in value]
    return deque(items, value.maxlen) if type(value) is deque else type(value)(items)


def _map_mapping(function: Callable[[Tensor], Tensor], value: abc.Mapping[Any, Any]) -> Any:
    items = {key: map_tensors(function, item) for key, item in value.items()}
    if not isinstance(value, abc.MutableMapping):
        return type(value)(items)  # type: ignore[call-arg]
    # A copy keeps what else the class holds, such as a default factory or the attributes of a model's output.
    result = copy.copy(value)
    for key, item in items.items():
        result[key] = item
    return result
