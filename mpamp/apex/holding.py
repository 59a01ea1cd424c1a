"""What an optimizer holds: parameters in groups, lists and keys, and other optimizers that it wraps."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping, MutableSet
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from .errors import AmpAttributeError

__all__ = ["Values", "attributes", "containers", "is_optimizer", "refuse_incomplete", "swap", "with_wrapped"]


def is_optimizer(value: Any) -> bool:
    """Tell whether an object is an optimizer, torch's or one that only has an optimizer's ``step`` and groups."""
    if isinstance(value, Optimizer):
        return True
    is_other = isinstance(value, Module | Tensor | type) or not hasattr(value, "param_groups")
    return not is_other and callable(getattr(value, "step", None))


def refuse_incomplete(optimizer: Any) -> None:
    """Refuse an optimizer that can't be stepped.

    Raises:
        AmpAttributeError: It has no groups of parameters, or no ``step`` of its own.
    """
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list | tuple) or not all(isinstance(g, Mapping) and "params" in g for g in groups):
        raise AmpAttributeError(f"this {type(optimizer).__name__} has no param_groups, a list of dicts with 'params'.")
    if getattr(optimizer.step, "__func__", None) in _ABSTRACT:
        raise AmpAttributeError(f"this {type(optimizer).__name__} has no step() of its own, so it can't be stepped.")


_CONTAINERS = (list, tuple, MutableMapping, MutableSet)
_ABSTRACT = {Optimizer.step, getattr(Optimizer.step, "__wrapped__", Optimizer.step)}


def attributes(value: Any) -> dict[str, Any]:
    """Return an object's own attributes, slots included."""
    try:
        found = dict(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        found = {}
    slots = [name for cls in type(value).__mro__ for name in _slots(cls)]
    missing = object()
    for name in slots:
        slot = getattr(value, name, missing)
        if slot is not missing:
            found[name] = slot
    return found


def _slots(cls: type) -> list[str]:
    slots = vars(cls).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if not name.startswith("__")]


def with_wrapped(optimizer: Any) -> list[Any]:
    """Return an optimizer and those that it wraps, itself first: in attributes, lists or dicts of its own."""
    found: list[Any] = []

    def visit(value: Any) -> None:
        if (value is optimizer or _is_wrapped(value)) and not any(value is known for known in found):
            found.append(value)
            for inner in attributes(value).values():
                for item in _items(inner):
                    visit(item)

    visit(optimizer)
    return found


def _is_wrapped(value: Any) -> bool:
    return is_optimizer(value) and isinstance(getattr(value, "param_groups", None), list | tuple)


def _items(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()


def containers(optimizer: Any) -> list[Any]:
    """Return the lists, dicts and sets that an optimizer and those that it wraps hold, nested ones too."""
    found: list[Any] = []
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if isinstance(value, _CONTAINERS) and id(value) not in seen:
            seen.add(id(value))
            if not isinstance(value, tuple):
                found.append(value)
            for item in [x for pair in value.items() for x in pair] if isinstance(value, MutableMapping) else value:
                visit(item)

    for holder in with_wrapped(optimizer):
        for value in [*holder.param_groups, *attributes(holder).values()]:
            visit(value)
    return found


def swap(optimizer: Any, others: Mapping[int, Tensor]) -> None:
    """Put other tensors in place of some that an optimizer holds: in groups, as keys of its state, in its own lists.

    Lists, dicts and sets are changed in place and stay in order; objects other than wrapped optimizers aren't entered.

    Args:
        optimizer: The optimizer.
        others: By the id of a tensor, what is put in its place.
    """
    seen: set[int] = set()
    for holder in with_wrapped(optimizer):
        for group in holder.param_groups:
            _swapped(group, others, seen)
        for name, value in attributes(holder).items():
            after = _swapped(value, others, seen)
            if after is not value:
                object.__setattr__(holder, name, after)


def _swapped(value: Any, others: Mapping[int, Tensor], seen: set[int]) -> Any:
    if isinstance(value, Tensor):
        return others.get(id(value), value)
    if not isinstance(value, _CONTAINERS) or id(value) in seen:
        return value
    seen.add(id(value))
    before = [x for item in value.items() for x in item] if isinstance(value, MutableMapping) else list(value)
    after = [_swapped(item, others, seen) for item in before]
    if all(a is b for a, b in zip(before, after, strict=True)):
        return value
    if isinstance(value, tuple):
        return type(value)._make(after) if hasattr(value, "_make") else type(value)(after)
    if isinstance(value, list):
        value[:] = after
    elif isinstance(value, MutableMapping):
        value.clear()
        value.update(zip(after[::2], after[1::2], strict=True))
    else:
        value.clear()
        for item in after:
            value.add(item)
    return value


class Values:
    """What an optimizer's parameters and its state are now, to be put back; the state as copies of everything."""

    def __init__(self, optimizer: Any) -> None:
        self._params = [(p, p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]
        found = (getattr(each, "state", None) for each in with_wrapped(optimizer))
        states = {id(state): state for state in found if isinstance(state, MutableMapping)}
        self._states = [(state, {key: copy.deepcopy(of) for key, of in state.items()}) for state in states.values()]

    @torch.no_grad()
    def put_back(self) -> None:
        """Have parameters and state be as they were."""
        for p, value in self._params:
            p.copy_(value)
        for state, before in self._states:
            state.clear()
            state.update(before)
