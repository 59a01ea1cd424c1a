"""Master weights: the float32 values of lower-precision tensors, and keeping the two in step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..torch_internals import foreach_copy_

__all__ = ["LOW", "Master", "adopt", "forget", "is_ahead", "is_same", "keep", "master_of", "write_back"]

LOW = frozenset({torch.float16, torch.bfloat16})


class Master:
    """A lower-precision tensor's float32 values, and what both were when they were last the same.

    Args:
        model: The tensor, most often a model's parameter.
        values: What the master starts from; the tensor's own values if None.
    """

    __slots__ = ("__weakref__", "is_stepped", "loaded", "low", "owners", "version", "weight")

    def __init__(self, model: Tensor, values: Tensor | None = None) -> None:
        self.weight = (model if values is None else values).detach().clone().float().requires_grad_(True)
        self.low = model.detach().clone()
        """The tensor's values then. Writes through ``.data`` don't move a version counter, so values are compared."""
        self.version = self.weight._version
        self.owners = 0
        """How many optimizers step it."""
        self.is_stepped = False
        """Whether its gradient has been stepped by one of several optimizers."""
        self.loaded: Tensor | None = None
        """What a state dict that is being loaded has for it."""


_masters: Any = WeakTensorKeyDictionary()

Pair = tuple[Tensor, Master]


def master_of(model: Tensor) -> Master | None:
    """Return a tensor's master, or None if it has none."""
    found: Master | None = _masters.get(model)
    return found


def keep(model: Tensor, master: Master) -> None:
    """Have a master be the tensor's from now on."""
    _masters[model] = master


def forget(model: Tensor) -> None:
    """Drop a tensor's master."""
    _masters.pop(model, None)


@torch.no_grad()
def adopt(model: Tensor, master: Master) -> None:
    """Take over what was written into a tensor since it and its master were last the same.

    Elements that weren't written stay as exact as they are in the master.
    """
    weight, now = master.weight, model.detach()
    if now.device != master.low.device or now.dtype is not master.low.dtype:
        master.low = master.low.to(now)
    kept = (now == master.low).to(weight.device)
    ahead = is_ahead(master)
    weight.copy_(torch.where(kept, weight, now.to(weight)))
    master.low.copy_(now)
    if not ahead:
        master.version = weight._version


def is_ahead(master: Master) -> bool:
    """Tell whether a master was written into since it and its tensor were last the same, where torch counts that."""
    return bool(master.weight._version != master.version)


def is_same(model: Tensor, master: Master) -> bool:
    """Tell whether a tensor has the values, NaN included, that it had when it and its master were last the same."""
    now, low = model.detach(), master.low
    same_kind = now.dtype is low.dtype and now.device == low.device
    return not same_kind or torch.equal(now.view(torch.int16), low.view(torch.int16))


@torch.no_grad()
def write_back(pairs: Iterable[Pair]) -> None:
    """Copy masters into their tensors: float32 -> the tensor's dtype."""
    pairs = list(pairs)
    if pairs:
        models = [model.detach() for model, _ in pairs]
        foreach_copy_(models, [master.weight for _, master in pairs])
        foreach_copy_([master.low for _, master in pairs], models)
    for _, master in pairs:
        master.version = master.weight._version
