"""``FusedSGD`` and ``FusedAdagrad``: torch's multi-tensor SGD and Adagrad, with apex's two ways to decay weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.optimizer import required
from torch.optim.sgd import sgd

from ...torch_internals import foreach_mul_
from ..errors import AmpValueError
from .base import Bucket, FusedOptimizer

__all__ = ["FusedAdagrad", "FusedSGD"]


class FusedSGD(FusedOptimizer):
    """SGD with momentum; apex's arguments, defaults and state.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate; may be left out where every group says its own.
        momentum: Momentum.
        dampening: How much less of the gradient goes into the momentum.
        weight_decay: Weight decay, added to the gradient.
        nesterov: Nesterov's momentum.
        wd_after_momentum: Add the weight decay after the momentum, not before.
        materialize_master_grads: Whether amp keeps float32 gradients of masters. apex could do without; here they
            are always there, and steps are the same.
        set_grad_none: Whether ``zero_grad()`` sets gradients to None.

    Raises:
        AmpValueError: A negative value, or ``nesterov`` without momentum or with dampening.
        ValueError: A group says no ``lr``, and none is given for all.

    Example:
        >>> p = torch.ones(2, requires_grad=True)
        >>> optimizer = FusedSGD([p], lr=0.25, momentum=0.9)
        >>> p.sum().backward()
        >>> optimizer.step()
        >>> p.detach()
        tensor([0.7500, 0.7500])
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = required,  # type: ignore[assignment]
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if value is not required and value < 0.0:  # type: ignore[comparison-overlap]
                raise AmpValueError(f"FusedSGD: {name} can't be negative, got {value}.")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise AmpValueError("FusedSGD: nesterov needs a momentum above 0 and a dampening of 0.")
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, set_grad_none)

    def _count(self, group: dict[str, Any]) -> None:
        """Count nothing: SGD needs no steps, and apex's groups have none."""

    def _update(self, group: dict[str, Any], bucket: Bucket) -> None:
        decay = group["weight_decay"]
        if self.wd_after_momentum and decay:
            foreach_mul_(bucket.params, 1 - group["lr"] * decay)
        buffers = [state.get("momentum_buffer") for state in bucket.states]
        sgd(
            bucket.params,
            bucket.grads,
            buffers,
            foreach=True,
            fused=False,
            weight_decay=0.0 if self.wd_after_momentum else decay,
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=False,
        )
        if group["momentum"]:
            for state, buffer in zip(bucket.states, buffers, strict=True):
                state["momentum_buffer"] = buffer


class FusedAdagrad(FusedOptimizer):
    """Adagrad; apex's arguments, defaults and state.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        eps: Added to the root of the sum of squares.
        weight_decay: Weight decay.
        set_grad_none: Whether ``zero_grad()`` sets gradients to None.
        adagrad_w_mode: Decay weights apart from the gradient; False adds the decay to it.

    Example:
        >>> p = torch.ones(2, requires_grad=True)
        >>> optimizer = FusedAdagrad([p], lr=0.5)
        >>> p.sum().backward()
        >>> optimizer.step()
        >>> p.detach()
        tensor([0.5000, 0.5000])
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        self.adagrad_w_mode = int(adagrad_w_mode)
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay}, set_grad_none)

    def _count(self, group: dict[str, Any]) -> None:
        """Count nothing: without decay of the learning rate Adagrad needs no steps."""

    def _update(self, group: dict[str, Any], bucket: Bucket) -> None:
        decay = group["weight_decay"]
        if self.adagrad_w_mode and decay:
            foreach_mul_(bucket.params, 1 - group["lr"] * decay)
        adagrad(
            bucket.params,
            bucket.grads,
            bucket.state("sum"),
            list(torch.zeros(len(bucket.params)).unbind()),
            foreach=True,
            fused=False,
            lr=group["lr"],
            weight_decay=0.0 if self.adagrad_w_mode else decay,
            lr_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )
