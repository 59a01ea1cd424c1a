"""What is a weight, what is a view of one, and what they live in."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

__all__ = ["REWRITTEN", "is_viewed_alike", "is_weight", "storage_of"]

Tensor = torch.Tensor
_float32 = torch.float32

_KINDS: dict[type, str] = {torch.Tensor: "leaf", torch.nn.Parameter: "parameter"}


def _kind(cls: type) -> str:
    """Say which tensors of a class are weights: all ("parameter"), leaves ("leaf"), or none ("")."""
    has_own_dispatch = cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]
    is_lazy = issubclass(cls, UninitializedTensorMixin)
    found = "parameter" if issubclass(cls, torch.nn.Parameter) and not has_own_dispatch and not is_lazy else ""
    _KINDS[cls] = found
    return found


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
    cls = type(tensor)
    kind = _KINDS[cls] if cls in _KINDS else _kind(cls)
    if kind == "leaf":
        if not tensor.requires_grad or tensor._is_view() or not tensor.is_leaf:
            return False
    elif not kind:
        return False
    if tensor.dtype is not _float32 or tensor.layout is not torch.strided or tensor.is_inference():
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


def is_viewed_alike(view: Tensor, base: Tensor) -> bool:
    """Tell whether a float32 view is of a weight, such that its strides say where it lies in a cast of that, too.

    Not a view whose data were replaced since, one whose numbers are the negatives of what its memory holds, nor
    one in forward-mode differentiation: it may have a tangent. FSDP1's flat parameter is no weight: it gathers
    its memory anew, past every counter.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(4, 2))
        >>> is_viewed_alike(weight.T, weight), is_viewed_alike(torch._neg_view(weight), weight)
        (True, False)
    """
    if not is_weight(base) or hasattr(base, "_is_flat_param") or view.is_neg() or forward_ad._current_level >= 0:
        return False
    storage = base.untyped_storage()
    if view.untyped_storage() is not storage or not storage.nbytes():
        return False
    # What isn't dense is cast to a tensor with other strides.
    return base.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(base))
