"""apex.fp16_utils's loss scalers, static and dynamic: another rule than amp's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["DynamicLossScaler", "LossScaler", "to_python_float"]


def to_python_float(t: Any) -> Any:
    """Return a tensor's one value, or the first of a sequence.

    Example:
        >>> to_python_float(torch.ones(1)), to_python_float([2.0])
        (1.0, 2.0)
    """
    return t.item() if hasattr(t, "item") else t[0]


class LossScaler:
    """A scale that stays as it is.

    Args:
        scale: The scale: dimensionless.

    Example:
        >>> LossScaler(128.0).loss_scale
        128.0
    """

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale = scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Tell of no overflow, ever."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Leave the scale alone."""

    @property
    def loss_scale(self) -> float:
        """The scale now."""
        return self.cur_scale

    def scale_gradient(self, module: Any, grad_in: Iterable[Tensor], grad_out: Any) -> tuple[Tensor, ...]:
        """Return gradients times the scale; a module's backward hook."""
        return tuple(self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run a backward pass from the loss times the scale."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A scale that shrinks on overflow, not below 1, and grows after ``scale_window`` iterations without.

    Args:
        init_scale: Where it starts.
        scale_factor: What it is divided and multiplied by.
        scale_window: Iterations since the last overflow after each of which it grows.

    Example:
        >>> scaler = DynamicLossScaler(init_scale=8.0, scale_window=2)
        >>> scaler.update_scale(True)
        >>> scaler.loss_scale
        4.0
    """

    def __init__(self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000) -> None:
        super().__init__(init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor, self.scale_window = scale_factor, scale_window

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Tell whether a gradient has an inf or NaN; waits for the device once."""
        grads = [p.grad.detach() for p in params if p.grad is not None]
        return self._has_inf_or_nan(*grads)

    @staticmethod
    def _has_inf_or_nan(*tensors: Tensor) -> bool:
        found = [torch.isfinite(_values(tensor)).all() for tensor in tensors]
        return bool(found) and not bool(torch.stack([one.to(found[0].device) for one in found]).all())

    def update_scale(self, overflow: bool) -> None:
        """Move the scale by what an iteration's gradients were."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1


def _values(tensor: Tensor) -> Tensor:
    return tensor.coalesce().values() if tensor.is_sparse else tensor


# Checkpoints hold these objects, ours and those that apex wrote: torch.load takes them.
torch.serialization.add_safe_globals(
    [
        LossScaler,
        DynamicLossScaler,
        (LossScaler, "apex.fp16_utils.loss_scaler.LossScaler"),
        (DynamicLossScaler, "apex.fp16_utils.loss_scaler.DynamicLossScaler"),
    ]
)
