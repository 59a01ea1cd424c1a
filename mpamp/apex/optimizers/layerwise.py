"""``FusedLAMB``, ``FusedMixedPrecisionLamb`` and ``FusedNovoGrad``: optimizers that look at each tensor's norm."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import AmpValueError
from ..masters import LOW
from .base import Bucket, FusedOptimizer, corrections, device_of, lr_on_device, refuse_amsgrad
from .moments import global_norm, grad_norms, lamb_, novograd_

__all__ = ["FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad"]


class FusedLAMB(FusedOptimizer):
    """LAMB; apex's arguments, defaults and state. No step waits for the device.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        bias_correction: Divide the moments by ``1 - beta ** step``.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Weight decay; a group without any isn't scaled by its norms, unless ``use_nvlamb``.
        amsgrad: Refused, as in apex.
        adam_w_mode: Decay weights apart from the moments; False adds the decay to the gradient.
        grad_averaging: Put ``1 - beta`` of a gradient into the first moment, not all of it.
        set_grad_none: Whether ``zero_grad()`` sets gradients to None.
        max_grad_norm: Gradients, all groups' together, are clipped to this norm.
        use_nvlamb: Scale groups without weight decay by their norms, too.

    Example:
        >>> p = torch.full((2,), 2.0, requires_grad=True)
        >>> optimizer = FusedLAMB([p], lr=0.5, weight_decay=0.01)
        >>> p.sum().backward()
        >>> optimizer.step()
        >>> p.detach()
        tensor([1., 1.])
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        refuse_amsgrad(self, amsgrad)
        self.adam_w_mode, self.use_nvlamb = int(adam_w_mode), use_nvlamb
        self._clip = torch.ones(())
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, set_grad_none)

    def _before_groups(self) -> None:
        norm = global_norm([p.grad.detach() for p in self._params() if p.grad is not None])
        most = self.defaults["max_grad_norm"]
        self._clip = torch.where(norm > most, norm / most, 1.0)

    def _update(self, group: dict[str, Any], bucket: Bucket) -> None:
        lamb_(
            bucket.params,
            bucket.grads,
            bucket.state("exp_avg"),
            bucket.state("exp_avg_sq"),
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            corrections=corrections(group),
            weight_decay=group["weight_decay"],
            grad_averaging=group["grad_averaging"],
            decoupled=bool(self.adam_w_mode),
            clip=self._clip.to(bucket.params[0]),
            use_nvlamb=self.use_nvlamb,
        )


class FusedMixedPrecisionLamb(FusedLAMB):
    """LAMB that keeps float32 masters of ``reduced_precision_dtype`` parameters; learning rate and step are tensors.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        step: The count of steps to start from.
        bias_correction: As ``FusedLAMB``; as are those below.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Weight decay.
        amsgrad: Refused, as in apex.
        adam_w_mode: Decay weights apart from the moments.
        grad_averaging: Put ``1 - beta`` of a gradient into the first moment.
        max_grad_norm: Gradients are clipped to this norm.
        use_nvlamb: Scale groups without weight decay by their norms, too.
        reduced_precision_dtype: Parameters of this dtype get masters, made at the first step.

    Example:
        >>> p = torch.full((2,), 2.0, dtype=torch.bfloat16, requires_grad=True)
        >>> optimizer = FusedMixedPrecisionLamb([p], lr=0.5, reduced_precision_dtype=torch.bfloat16)
        >>> p.sum().backward()
        >>> optimizer.step()
        >>> p.detach()
        tensor([1., 1.], dtype=torch.bfloat16)
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        self.reduced_precision_dtype, self._first = reduced_precision_dtype, step
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            weight_decay,
            amsgrad,
            adam_w_mode,
            grad_averaging,
            True,
            max_grad_norm,
            use_nvlamb,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its learning rate and its count of steps become tensors on its device."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        lr_on_device(group)
        group["step"] = torch.tensor([self._first], dtype=torch.int32, device=device_of(group))

    def _has_masters(self, dtype: torch.dtype) -> bool:
        return dtype is self.reduced_precision_dtype and dtype in LOW


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad; apex's arguments and defaults. No step waits for the device.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        bias_correction: Divide the moments by ``1 - beta ** step``.
        betas: Decay of the moment and of the norms.
        eps: Added to a norm.
        weight_decay: Weight decay.
        amsgrad: Refused, as in apex.
        reg_inside_moment: Divide by the norm and decay weights before the moment, not after.
        grad_averaging: Put ``1 - beta`` of a gradient into the moment, not all of it.
        norm_type: 2, or 0 for the greatest magnitude.
        init_zero: Start the norms at 0, not at those of the first step.
        set_grad_none: Whether ``zero_grad()`` sets gradients to None.

    Example:
        >>> p = torch.full((4,), 1.0, requires_grad=True)
        >>> optimizer = FusedNovoGrad([p], lr=0.5, bias_correction=False, grad_averaging=False)
        >>> p.sum().backward()
        >>> optimizer.step()
        >>> p.detach()
        tensor([0.7500, 0.7500, 0.7500, 0.7500])
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        refuse_amsgrad(self, amsgrad)
        if norm_type not in (0, 2):
            raise AmpValueError(f"FusedNovoGrad: norm_type is 2, or 0 for the greatest magnitude; got {norm_type!r}.")
        self.moment_mode = 0 if reg_inside_moment else 1
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults, set_grad_none)

    def _update(self, group: dict[str, Any], bucket: Bucket) -> None:
        new = [index for index, state in enumerate(bucket.states) if "norm" not in state]
        if new:
            first = grad_norms([bucket.grads[index] for index in new], group["norm_type"])
            for index, norm in zip(new, first.unbind(), strict=True):
                bucket.states[index]["norm"] = torch.zeros_like(norm) if group["init_zero"] else norm
        norms = torch.stack([state["norm"] for state in bucket.states])
        novograd_(
            bucket.params,
            bucket.grads,
            bucket.state("exp_avg"),
            norms,
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            corrections=corrections(group),
            weight_decay=group["weight_decay"],
            grad_averaging=group["grad_averaging"],
            inside=self.moment_mode == 0,
            norm_type=group["norm_type"],
        )
        for state, norm in zip(bucket.states, norms.unbind(), strict=True):
            state["norm"] = norm
