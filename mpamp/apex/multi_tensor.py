"""apex.multi_tensor_apply, and what scripts take from amp_C and apex_C: calls on many tensors by torch._foreach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..torch_internals import (
    flatten_dense_tensors,
    foreach_add,
    foreach_copy_,
    foreach_mul,
    foreach_norm,
    unflatten_dense_tensors,
)

__all__ = [
    "MultiTensorApply",
    "flatten",
    "multi_tensor_applier",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "unflatten",
]

Lists = Sequence[Sequence[Tensor]]


class MultiTensorApply:
    """Calls a function of ``amp_C`` with lists of tensors.

    Args:
        chunk_size: How much apex's kernels took at once; nothing here asks for it.

    Example:
        >>> halved = [torch.empty(2)]
        >>> flag = torch.zeros(1, dtype=torch.int32)
        >>> multi_tensor_applier(multi_tensor_scale, flag, [[torch.ones(2)], halved], 0.5)
        >>> halved, flag.item()
        ([tensor([0.5000, 0.5000])], 0)
    """

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Lists, *args: Any) -> Any:
        """Return what ``op`` returns for the lists."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float) -> None:
    """Write the first list times ``scale`` into the second: any dtypes, multiplied in float32.

    Sets ``noop_flag`` to 1 if an input has an inf or NaN; doesn't wait for the device.
    """
    sources, targets = map(list, tensor_lists)
    if sources:
        _flag(noop_flag, sources)
        foreach_copy_(targets, foreach_mul(_wide(sources), scale))


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, a: float, b: float, arg_to_check: int = -1
) -> None:
    """Write ``a`` times the first list plus ``b`` times the second into the third.

    Sets ``noop_flag`` to 1 if the first (``arg_to_check`` 0), the second (1) or either (-1) has an inf or NaN.
    """
    xs, ys, targets = map(list, tensor_lists)
    if xs:
        _flag(noop_flag, {0: xs, 1: ys}.get(arg_to_check, xs + ys))
        totals = foreach_add(foreach_mul(_wide(xs), a), foreach_mul(_wide(ys), b))
        foreach_copy_(targets, totals)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Return the L2 norm of a list as one vector, and each tensor's if ``per_tensor``: float32, (1,) and (n,)."""
    (tensors,) = map(list, tensor_lists)
    if not tensors:
        return noop_flag.new_zeros(1, dtype=torch.float32), noop_flag.new_zeros(0, dtype=torch.float32)
    norms = torch.stack(foreach_norm(tensors, dtype=torch.float32))
    return torch.linalg.vector_norm(norms).reshape(1), norms if per_tensor else norms.new_zeros(0)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of one dtype as one vector.

    Example:
        >>> flatten([torch.ones(1, 2), torch.zeros(1)])
        tensor([1., 1., 0.])
    """
    flat: Tensor = flatten_dense_tensors(list(tensors))
    return flat


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a vector in the shapes of ``tensors``.

    Example:
        >>> [part.shape for part in unflatten(torch.zeros(3), [torch.ones(1, 2), torch.ones(1)])]
        [torch.Size([1, 2]), torch.Size([1])]
    """
    return list(unflatten_dense_tensors(flat, list(tensors)))


def _wide(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.float() if tensor.dtype.itemsize < 4 else tensor for tensor in tensors]


def _flag(noop_flag: Tensor, tensors: list[Tensor]) -> None:
    """Raise a flag on its device if a tensor has an inf or NaN."""
    norms = [norm.to(noop_flag.device) for norm in foreach_norm(_wide(tensors), float("inf"))]
    noop_flag.masked_fill_(~torch.isfinite(torch.stack(norms)).all(), 1)
