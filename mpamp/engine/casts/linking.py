"""Makes a cast, and gives a kept one the gradient of what is asked for: the weight, or a view of it."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .entries import Entry
from .weights import is_apart

__all__ = ["cast", "guarded", "linked", "viewed"]

Tensor = torch.Tensor
_is_grad_enabled = torch.is_grad_enabled
_mode_depth = torch._C._len_torch_dispatch_stack


def cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a weight to ``dtype``."""
    if not torch.is_inference_mode_enabled():
        return weight.to(dtype)
    with torch.inference_mode(False), torch.no_grad():  # so that a later backward pass can save it
        return weight.to(dtype)


class _Linked(torch.autograd.Function):
    """Gives kept low-precision data the gradient of what it was cast from."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, low: Tensor) -> Tensor:
        ctx.dtype = source.dtype
        return low.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


def guarded(entry: Entry, weight: Tensor) -> Tensor | None:
    """Return a kept cast where dispatch modes see it, or saw it being made: they get aliases of their own."""
    if _mode_depth() < entry.depth:
        return None
    if _is_grad_enabled() and weight.requires_grad:
        return _Linked.apply(weight, entry.low)  # type: ignore[no-any-return,no-untyped-call]
    return entry.low.detach()


def linked(entry: Entry, weight: Tensor) -> Tensor:
    """Return a kept cast with the gradient of its weight: one for all uses, as long as one of them is alive."""
    graph = None if entry.graph is None else entry.graph()
    if graph is None:
        graph = _Linked.apply(weight, entry.low)  # type: ignore[no-untyped-call]
        entry.graph = weakref.ref(graph)
    else:
        graph._fix_weakref()  # type: ignore[attr-defined]  # its Python object may belong to C++ by now
    return graph


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
        return _Linked.apply(view, found)  # type: ignore[no-any-return,no-untyped-call]
    return found
