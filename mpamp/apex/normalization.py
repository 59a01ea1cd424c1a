"""apex.normalization: layer norm and RMS norm over torch's, which are fused themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import AmpUsageError

__all__ = [
    "FastLayerNorm",
    "FusedLayerNorm",
    "FusedRMSNorm",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]

Shape = int | Sequence[int]


def _shape(value: Shape) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


def _wide(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return tensors of different dtypes in the widest of them: float32 or more."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = dtype if tensor is None else torch.promote_types(dtype, tensor.dtype)
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


def _is_mixed(input: Tensor, weight: Tensor | None) -> bool:
    """Tell whether dtypes differ, and no region is there to decide."""
    is_alike = weight is None or weight.dtype is input.dtype
    return not is_alike and not torch.is_autocast_enabled(input.device.type)


def _layer_norm(input: Tensor, shape: Shape, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if _is_mixed(input, weight):
        wide, weight, bias = _wide(input, weight, bias)
        assert wide is not None
        return F.layer_norm(wide, _shape(shape), weight, bias, eps)
    return F.layer_norm(input, _shape(shape), weight, bias, eps)


def _rms_norm(input: Tensor, shape: Shape, weight: Tensor | None, eps: float) -> Tensor:
    if _is_mixed(input, weight):
        wide, weight = _wide(input, weight)
        assert wide is not None
        return F.rms_norm(wide, _shape(shape), weight, eps)
    return F.rms_norm(input, _shape(shape), weight, eps)


# -- Functions ---------------------------------------------------------------------------------------


def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return the layer norm over the last dimensions, without weights; same shape.

    Example:
        >>> fused_layer_norm(torch.tensor([[1.0, 3.0]]), 2)
        tensor([[-1.0000,  1.0000]])
    """
    return _layer_norm(input, normalized_shape, None, None, eps)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Return the layer norm over the last dimensions in the input's dtype; same shape."""
    out = _layer_norm(input, normalized_shape, weight, bias, eps)
    return out.to(input.dtype) if _is_mixed(input, weight) else out


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Return the layer norm over the last dimensions in the weight's dtype; same shape."""
    return _layer_norm(input, normalized_shape, weight, bias, eps).to(weight.dtype)


def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """Return the input over its root mean square along the last dimensions; same shape.

    Example:
        >>> fused_rms_norm(torch.tensor([[3.0, 3.0]]), 2)
        tensor([[1.0000, 1.0000]])
    """
    return _rms_norm(input, normalized_shape, None, eps)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return the RMS norm along the last dimensions in the input's dtype; same shape."""
    out = _rms_norm(input, normalized_shape, weight, eps)
    return out.to(input.dtype) if _is_mixed(input, weight) else out


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return the RMS norm along the last dimensions in the weight's dtype; same shape."""
    return _rms_norm(input, normalized_shape, weight, eps).to(weight.dtype)


def manual_rms_norm(input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float) -> Tensor:
    """Return the RMS norm, its statistics in float32; times the weight in the weight's dtype, if lower precision."""
    dims = tuple(range(-len(_shape(normalized_shape)), 0))
    out = input * torch.rsqrt(input.float().pow(2).mean(dims, keepdim=True) + eps)
    if weight is None:
        return out
    return weight * (out.to(weight.dtype) if weight.dtype.itemsize < 4 else out)


# -- Modules -----------------------------------------------------------------------------------------


class FusedLayerNorm(nn.LayerNorm):
    """torch's layer norm with apex's arguments.

    Args:
        normalized_shape: The last dimensions.
        eps: Added to the variance.
        elementwise_affine: Whether there are a weight and a bias.
        memory_efficient: apex recomputed the input from the output then; results are the same.

    Example:
        >>> FusedLayerNorm(2)(torch.tensor([[1.0, 3.0]])).detach()
        tensor([[-1.0000,  1.0000]])
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(_shape(normalized_shape), eps, elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer norm in the input's dtype, unless a region decides otherwise; same shape."""
        shape = list(self.normalized_shape)
        if self.weight is None:
            return fused_layer_norm(input, shape, self.eps)
        return fused_layer_norm_affine(input, self.weight, self.bias, shape, self.eps)


class FastLayerNorm(FusedLayerNorm):
    """apex.contrib's layer norm over one dimension, which always has weights.

    Example:
        >>> FastLayerNorm(2)(torch.tensor([[1.0, 3.0]])).detach()
        tensor([[-1.0000,  1.0000]])
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__(hidden_size, eps, True, memory_efficient)


class FusedRMSNorm(nn.RMSNorm):
    """torch's RMS norm with apex's arguments.

    Args:
        normalized_shape: The last dimensions.
        eps: Added to the mean of squares.
        elementwise_affine: Whether there is a weight.
        memory_efficient: apex recomputed the input from the output then; results are the same.

    Example:
        >>> FusedRMSNorm(2)(torch.tensor([[3.0, 3.0]])).detach()
        tensor([[1.0000, 1.0000]])
    """

    eps: float

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(_shape(normalized_shape), eps, elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, x: Tensor) -> Tensor:
        """Return the RMS norm in the input's dtype, unless a region decides otherwise; same shape."""
        shape = list(self.normalized_shape)
        if self.weight is None:
            return fused_rms_norm(x, shape, self.eps)
        return fused_rms_norm_affine(x, self.weight, shape, self.eps)


class MixedFusedLayerNorm(FusedLayerNorm):
    """A layer norm whose output has the dtype of its weights, whatever the input has.

    Raises:
        AmpUsageError: ``elementwise_affine=False``.

    Example:
        >>> MixedFusedLayerNorm(2)(torch.ones(1, 2, dtype=torch.bfloat16)).dtype
        torch.float32
    """

    def __init__(self, normalized_shape: Shape, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(normalized_shape, eps, *_mixed(type(self), kwargs))

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer norm in the weight's dtype; same shape."""
        shape = list(self.normalized_shape)
        return mixed_dtype_fused_layer_norm_affine(input, self.weight, self.bias, shape, self.eps)


class MixedFusedRMSNorm(FusedRMSNorm):
    """An RMS norm whose output has the dtype of its weight, whatever the input has.

    Raises:
        AmpUsageError: ``elementwise_affine=False``.

    Example:
        >>> MixedFusedRMSNorm(2)(torch.ones(1, 2, dtype=torch.bfloat16)).dtype
        torch.float32
    """

    def __init__(self, normalized_shape: Shape, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(normalized_shape, eps, *_mixed(type(self), kwargs))

    def forward(self, x: Tensor) -> Tensor:
        """Return the RMS norm in the weight's dtype; same shape."""
        return mixed_dtype_fused_rms_norm_affine(x, self.weight, list(self.normalized_shape), self.eps)


def _mixed(cls: type, options: dict[str, Any]) -> tuple[bool, bool]:
    """Return the constructor's last two arguments, of a layer that has to have weights."""
    if not options.pop("elementwise_affine", True):
        raise AmpUsageError(f"{cls.__name__} has no elementwise_affine=False: its output has its weight's dtype.")
    memory_efficient = bool(options.pop("memory_efficient", False))
    if options:
        raise AmpUsageError(f"{cls.__name__} has no argument {', '.join(options)}.")
    return True, memory_efficient
