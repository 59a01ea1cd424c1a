"""Makes a cast, and gives a kept one the gradient of what is asked for: the weight, or a view of it."""

from __future__ import annotations

from typing import Any

import torch

from ...torch_internals import (
    len_torch_dispatch_stack,
    pop_saved_tensors_default_hooks,
    push_saved_tensors_default_hooks,
    top_saved_tensors_default_hooks,
)
from .entries import Entry, Link
from .weights import is_apart

__all__ = ["cast", "guarded", "linked", "viewed"]

Tensor = torch.Tensor
_is_grad_enabled = torch.is_grad_enabled
_mode_depth = len_torch_dispatch_stack
_hooks = top_saved_tensors_default_hooks
_push_hooks = push_saved_tensors_default_hooks
_pop_hooks = pop_saved_tensors_default_hooks


def cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a weight to ``dtype``."""
    if not torch.is_inference_mode_enabled():
        return weight.to(dtype)
    with torch.inference_mode(False), torch.no_grad():  # so that a later backward pass can save it
        return weight.to(dtype)


class _Linked(torch.autograd.Function):
    """Gives kept low-precision data the gradient of what it was cast from."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, low: Tensor, saves: bool) -> Tensor:
        ctx.dtype = source.dtype
        cast = low.detach()
        if saves:  # so that ``Link`` gets another tensor of the same node from it
            ctx.save_for_backward(cast)
        return cast

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        return grads[0].to(ctx.dtype), None, None


def guarded(entry: Entry, weight: Tensor) -> Tensor | None:
    """Return a kept cast where dispatch modes see it, or saw it being made: they get aliases of their own."""
    if _mode_depth() < entry.depth:
        return None
    if _is_grad_enabled() and weight.requires_grad:
        return _Linked.apply(weight, entry.low, False)  # type: ignore[no-any-return,no-untyped-call]
    return entry.low.detach()


def linked(entry: Entry, weight: Tensor) -> Tensor:
    """Return a kept cast with the gradient of its weight: of one node for all uses, as long as a graph has that."""
    found = None if entry.graph is None else entry.graph.use()
    if found is None:
        found = _apply_unseen(weight, entry.low)
        entry.graph = Link(found)
    return found


def _apply_unseen(weight: Tensor, low: Tensor) -> Tensor:
    """Link a cast such that hooks on saved tensors, as checkpoints and offloading set, don't see that it is saved."""
    if _hooks(True) is None:
        return _Linked.apply(weight, low, True)  # type: ignore[no-any-return,no-untyped-call]
    _push_hooks(_as_it_is, _as_it_is)
    try:
        return _Linked.apply(weight, low, True)  # type: ignore[no-any-return,no-untyped-call]
    finally:
        _pop_hooks()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def viewed(entry: Entry, view: Tensor) -> Tensor | None:
    """Return of a weight's kept cast what ``view`` is of the weight, with the gradient of the view, or None.

    Both begin where their memory does and have the same strides, so the view's lead to the same elements.
    """
    if not entry.is_alike or view.untyped_storage() is not entry.storage() or is_apart(view):
        return None
    depth, low = _mode_depth(), entry.low
    if depth:
        if depth < entry.depth:
            return None
        low = low.detach()
    found = low.as_strided(view.shape, view.stride(), view.storage_offset())
    if _is_grad_enabled() and view.requires_grad:
        return _Linked.apply(view, found, False)  # type: ignore[no-any-return,no-untyped-call]
    return found
