"""What is a weight, what is a view of one, and what they live in."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from ...torch_internals import HIDES_HELD_TENSORS, forward_ad_level

__all__ = [
    "REWRITTEN",
    "is_all_of",
    "is_apart",
    "is_plain_class",
    "is_viewable",
    "is_weight",
    "kind_of",
    "live_tensors",
    "storage_of",
]

Tensor = torch.Tensor
_float32 = torch.float32

_KINDS: dict[type, str] = {torch.Tensor: "leaf", torch.nn.Parameter: "parameter"}


def _kind(cls: type) -> str:
    """Say which tensors of a class are weights: all ("parameter"), leaves ("leaf"), or none ("")."""
    is_lazy = issubclass(cls, UninitializedTensorMixin)
    found = "parameter" if issubclass(cls, torch.nn.Parameter) and is_plain_class(cls) and not is_lazy else ""
    _KINDS[cls] = found
    return found


def is_plain_class(cls: type[Tensor]) -> bool:
    """Tell whether what ops do to tensors of a class is torch's business alone."""
    return cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def kind_of(cls: type) -> str:
    """Say which float32 tensors of a class are weights: all ("parameter"), leaves ("leaf"), or none ("")."""
    return _KINDS[cls] if cls in _KINDS else _kind(cls)


def is_weight(tensor: Tensor) -> bool:
    """Tell whether the cache keeps casts of this tensor.

    Views are none, but may be of one: without grad mode, those of a leaf look like leaves. A tensor in a part of
    a larger storage is none: whoever owns the whole writes into it without raising the tensor's version counter,
    such as flat parameters and ``vector_to_parameters``. Nor is one whose counter was once set back after a
    write, as FSDP2 does with the parameters that it gathers.

    Example:
        >>> is_weight(torch.nn.Parameter(torch.ones(2), requires_grad=False)), is_weight(torch.ones(2))
        (True, False)
        >>> is_weight(torch.nn.Parameter(torch.ones(4)[:2]))
        False
    """
    kind = kind_of(type(tensor))
    if kind == "leaf":
        if not tensor.requires_grad or tensor._is_view() or not tensor.is_leaf:
            return False
    elif not kind:
        return False
    if tensor.dtype is not _float32 or tensor.layout is not torch.strided or tensor.is_inference() or tensor.is_nested:
        return False
    storage = tensor.untyped_storage()
    # Of a device in pure Python the memory is elsewhere: its storages are empty.
    return storage.nbytes() in (0, 4 * tensor.numel()) and not hasattr(storage, REWRITTEN)


REWRITTEN = "_mpamp_is_rewritten"
"""The name of what marks a storage that is written into past every counter."""


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return what a tensor lives in; None for layouts and classes that have no storage of their own."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def live_tensors() -> list[Tensor]:
    """Return every tensor that Python knows of, those that a graph holds too.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> any(tensor is weight for tensor in live_tensors())
        True
    """
    classes = dict.fromkeys(_with_subclasses(Tensor))
    if HIDES_HELD_TENSORS:
        return list(_instances(set(map(id, classes))))
    # gc.get_objects would also give tuples that other threads are just building, which Python then can't resize.
    return [value for value in gc.get_referrers(*classes) if issubclass(type(value), Tensor)]


def _instances(classes: set[int]) -> Iterator[Any]:
    """Give all objects of the classes with these ids, without the GIL given up in between, if C asks for all.

    The list of all objects is one of them: none of these iterators keeps it once the last object is out.
    """
    chained = itertools.chain.from_iterable
    objects = chained(map(gc.get_objects, (None,)))
    twice = chained(map(itertools.repeat, objects, itertools.repeat(2)))  # one to give and one to ask for its type
    return itertools.compress(twice, map(classes.__contains__, map(id, map(type, twice))))


def _with_subclasses(cls: type) -> Iterator[type]:
    yield cls
    subclasses: list[type] = type.__subclasses__(cls)
    for subclass in subclasses:
        yield from _with_subclasses(subclass)


def is_apart(view: Tensor) -> bool:
    """Tell whether a view isn't told by where it lies: it is the negative of that, or may have a tangent."""
    return view.is_neg() or forward_ad_level() >= 0


def is_viewable(weight: Tensor) -> bool:
    """Tell whether a weight's views say by their strides where they lie in a cast of the weight, too.

    What isn't dense is cast to a tensor with other strides. FSDP1's flat parameter gathers its memory anew, past
    every counter.

    Example:
        >>> is_viewable(torch.nn.Parameter(torch.ones(4, 2))), is_viewable(torch.ones(4, 2))
        (True, False)
    """
    if not is_weight(weight) or hasattr(weight, "_is_flat_param") or not weight.untyped_storage().nbytes():
        return False
    return _is_dense(weight)


def is_all_of(view: Tensor, base: Tensor) -> bool:
    """Tell whether a view of a dense weight only turns it: its own cast has all of the elements, where they lie.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(4, 2))
        >>> [is_all_of(view, weight) for view in (weight.T, weight.view(8), weight[:2], weight[:1].expand(4, 2))]
        [True, True, False, False]
    """
    if view.numel() != base.numel() or view.storage_offset() != base.storage_offset():
        return False
    return _is_dense(view)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))
