"""``FusedAdam``: Adam and AdamW by torch's fused kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from ...torch_internals import foreach_div, foreach_norm, get_fused_kernels_supported_devices
from ..errors import AmpUsageError
from ..masters import LOW
from .base import Bucket, FusedOptimizer, lr_on_device, refuse_amsgrad

__all__ = ["FusedAdam"]


class FusedAdam(FusedOptimizer):
    """Adam, with decoupled weight decay unless ``adam_w_mode=False``; apex's arguments, defaults and state.

    Moments are float32, whatever the parameters are.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        bias_correction: Divide the moments by ``1 - beta ** step``.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        adam_w_mode: Decay weights apart from the moments, as AdamW; False adds the decay to the gradient.
        weight_decay: Weight decay.
        amsgrad: Refused, as in apex.
        set_grad_none: Whether ``zero_grad()`` sets gradients to None.
        capturable: Keep learning rate and step count on the device, for CUDA graphs.
        master_weights: Step float32 copies of lower-precision parameters; apex asks for ``capturable`` with it.
        max_grad_norm: Clip each group's gradients to this norm, 0 not at all; apex's had it in 2018 and 2019.

    Raises:
        AmpUsageError: ``amsgrad``, or ``master_weights`` without ``capturable``.

    Example:
        >>> p = torch.ones(2, requires_grad=True)
        >>> optimizer = FusedAdam([p], lr=0.5)
        >>> p.sum().backward()
        >>> optimizer.step()
        >>> p.detach()
        tensor([0.5000, 0.5000])
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        *,
        max_grad_norm: float = 0.0,
    ) -> None:
        refuse_amsgrad(self, amsgrad)
        if master_weights and not capturable:
            raise AmpUsageError("FusedAdam(master_weights=True) needs capturable=True, as in apex.")
        self.adam_w_mode, self.capturable, self.master_weights = int(adam_w_mode), capturable, master_weights
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, set_grad_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its learning rate becomes a tensor on its device with ``capturable``."""
        super().add_param_group(param_group)
        if self.capturable:
            lr_on_device(self.param_groups[-1])

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
    ) -> Any:
        """Take a step; return what ``closure``, which is called before, returns.

        Raises:
            AmpUsageError: One of the arguments that apex dropped in 2019.
        """
        if any(value is not None for value in (grads, output_params, scale, grad_norms)):
            raise AmpUsageError(
                "FusedAdam.step takes no gradients, scale and norms, as in apex since 2019: scale by amp.scale_loss or "
                "FP16_Optimizer, and call step() alone."
            )
        return super().step(closure)

    def _count(self, group: dict[str, Any]) -> None:
        if self.capturable and not isinstance(group.get("step"), Tensor):
            device = group["params"][0].device
            group["step"] = torch.tensor([group.get("step", 0)], dtype=torch.int32, device=device)
        super()._count(group)

    def _has_masters(self, dtype: torch.dtype) -> bool:
        return self.master_weights and dtype in LOW

    def _update(self, group: dict[str, Any], bucket: Bucket) -> None:
        if group.get("max_grad_norm", 0.0) > 0:
            self._clip(group["max_grad_norm"], bucket)
        exp_avgs, exp_avg_sqs = bucket.state("exp_avg"), bucket.state("exp_avg_sq")
        device = bucket.params[0].device
        # The steps before this one; after infinitely many the corrections are exactly 1.
        step = group["step"] - 1 if group["bias_correction"] else math.inf
        steps = torch.full((len(bucket.params),), 0.0, device=device).add_(step).unbind()
        first, second = group["betas"]
        adam(
            bucket.params,
            bucket.grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            list(steps),
            capturable=self.capturable,
            fused=device.type in get_fused_kernels_supported_devices(),
            decoupled_weight_decay=bool(self.adam_w_mode),
            amsgrad=False,
            beta1=first,
            beta2=second,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    @staticmethod
    def _clip(most: float, bucket: Bucket) -> None:
        norm = torch.linalg.vector_norm(torch.stack(foreach_norm(bucket.grads)))
        bucket.grads = list(foreach_div(bucket.grads, ((norm + 1e-6) / most).clamp(min=1.0)))
