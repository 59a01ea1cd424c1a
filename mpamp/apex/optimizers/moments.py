"""The arithmetic that torch has no optimizer for, on lists of tensors: LAMB's update and NovoGrad's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...torch_internals import (
    foreach_add_,
    foreach_addcmul_,
    foreach_div,
    foreach_div_,
    foreach_mul_,
    foreach_norm,
    foreach_sqrt_,
    foreach_sub_,
)
from ..masters import LOW

__all__ = ["global_norm", "grad_norms", "lamb_", "novograd_"]

Tensors = list[Tensor]


def global_norm(tensors: Tensors) -> Tensor:
    """Return the L2 norm of tensors of any dtypes as one vector: a float32 scalar on the first one's device.

    Example:
        >>> global_norm([torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.float16)])
        tensor(5.)
    """
    if not tensors:
        return torch.zeros(())
    device = tensors[0].device
    low = [tensor for tensor in tensors if tensor.dtype in LOW]
    rest = [tensor for tensor in tensors if tensor.dtype not in LOW]
    norms = [norm.to(device, torch.float32) for norm in (*_norms(low, torch.float32), *_norms(rest, None))]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def _norms(tensors: Tensors, dtype: torch.dtype | None) -> Sequence[Tensor]:
    return foreach_norm(tensors, dtype=dtype) if tensors else ()


def lamb_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    corrections: tuple[Any, Any],
    weight_decay: float,
    grad_averaging: bool,
    decoupled: bool,
    clip: Tensor,
    use_nvlamb: bool,
) -> None:
    """Take a step of LAMB (arXiv:1904.00962), in place; everything in float32.

    Args:
        params: Parameters.
        grads: Their gradients.
        exp_avgs: First moments.
        exp_avg_sqs: Second moments.
        lr: Learning rate.
        betas: Decay of the moments.
        eps: Added to the root of the second moment.
        corrections: What the moments are divided by.
        weight_decay: Weight decay.
        grad_averaging: Put ``1 - beta`` of a gradient into the first moment, not all of it.
        decoupled: Decay apart from the moments; False adds the decay to the gradient.
        clip: What gradients are divided by: their global norm over the greatest that is allowed, at least 1.
        use_nvlamb: Scale by the norms of parameter and update where there is no decay, too.
    """
    first, second = betas
    grads = list(foreach_div(grads, clip))
    if weight_decay and not decoupled:
        foreach_add_(grads, params, alpha=weight_decay)
    foreach_mul_(exp_avgs, first)
    foreach_add_(exp_avgs, grads, alpha=1 - first if grad_averaging else 1.0)
    foreach_mul_(exp_avg_sqs, second)
    foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - second)
    denominators = list(foreach_div(exp_avg_sqs, corrections[1]))
    foreach_sqrt_(denominators)
    foreach_add_(denominators, eps)
    updates = list(foreach_div(exp_avgs, corrections[0]))
    foreach_div_(updates, denominators)
    if weight_decay and decoupled:
        foreach_add_(updates, params, alpha=weight_decay)
    if use_nvlamb or weight_decay:
        weights, changes = torch.stack(foreach_norm(params)), torch.stack(foreach_norm(updates))
        ratios = torch.where((weights != 0) & (changes != 0), weights / changes, 1.0) * lr
        foreach_mul_(updates, list(ratios.unbind()))
    else:
        foreach_mul_(updates, lr)
    foreach_sub_(params, updates)


def novograd_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    norms: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    corrections: tuple[float, float],
    weight_decay: float,
    grad_averaging: bool,
    inside: bool,
    norm_type: int,
) -> None:
    """Take a step of NovoGrad (arXiv:1905.11286), in place; everything in float32.

    Args:
        params: Parameters.
        grads: Their gradients.
        exp_avgs: First moments.
        norms: Averages of the gradients' norms, one for each parameter.
        lr: Learning rate.
        betas: Decay of the moments and of the norms.
        eps: Added to a norm.
        corrections: What the moments and the squared norms are divided by.
        weight_decay: Weight decay.
        grad_averaging: Put ``1 - beta`` of a gradient into the moment, not all of it.
        inside: Divide by the norm and decay weights before the moment, not after.
        norm_type: 2, or 0 for the greatest magnitude.
    """
    (first, second), (of_moment, of_square) = betas, corrections
    now = grad_norms(grads, norm_type)
    if norm_type == 2:
        norms.copy_((second * norms**2 + (1 - second) * now**2).sqrt())
    else:
        norms.mul_(second).add_(now, alpha=1 - second)
    denominators = list((norms / of_square**0.5 + eps).unbind())
    weight = 1 - first if grad_averaging else 1.0
    foreach_mul_(exp_avgs, first)
    if inside:
        grads = list(foreach_div(grads, denominators))
        foreach_add_(grads, params, alpha=weight_decay)
        foreach_add_(exp_avgs, grads, alpha=weight)
        updates = list(foreach_div(exp_avgs, of_moment))
    else:
        foreach_add_(exp_avgs, grads, alpha=weight)
        updates = list(foreach_div(exp_avgs, of_moment))
        foreach_div_(updates, denominators)
        foreach_add_(updates, params, alpha=weight_decay)
    foreach_add_(params, updates, alpha=-lr)


def grad_norms(grads: Tensors, norm_type: int) -> Tensor:
    """Return each gradient's norm, ``norm_type`` 2 or 0 for the greatest magnitude: float32, one for each."""
    return torch.stack(foreach_norm(grads, 2.0 if norm_type == 2 else float("inf")))
