"""What a scaler does on the device: unscale and check gradients, and move the scale. Never waits for it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..devices.registry import device_state
from ..torch_internals import amp_foreach_non_finite_check_and_unscale_, amp_update_scale_
from .gradients import Bucket, local_part, sort_gradients, values_of

__all__ = ["Rule", "combine", "inverse", "is_on_host", "rescale_", "unless", "unscale_bucket_", "update_scale_"]

UNSCALE = "aten::_amp_foreach_non_finite_check_and_unscale_"
UPDATE = "aten::_amp_update_scale_"
_REALS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
AT_ONCE = 32
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
_LOW = frozenset({torch.float16, torch.bfloat16})


class Rule(NamedTuple):
    """How the scale moves; ``ScaleState`` says what each means."""

    growth_factor: float
    backoff_factor: float
    growth_interval: int
    min_scale: float | None
    max_scale: float | None


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on another device, queued there; a copy to the host, which reads it at once, is waited for."""
    return tensor.to(device, non_blocking=device.type in _asynchronous())


class Copies:
    """A tensor, and copies of it on the other devices where it is asked for."""

    def __init__(self, tensor: Tensor) -> None:
        self.by_device = {tensor.device: tensor}
        self._tensor = tensor

    def at(self, device: torch.device) -> Tensor:
        """Return the tensor itself on its own device, else the copy of it there."""
        if device not in self.by_device:
            self.by_device[device] = moved(self._tensor, device)
        return self.by_device[device]


@functools.cache
def has_kernel(device_type: str, op: str) -> bool:
    """Tell whether a device has a kernel of its own for an op, as its backend says."""
    return device_state(device_type).backend.has_kernel(op)


def is_on_host(tensor: Tensor) -> bool:
    """Tell whether the host can read a tensor without waiting for a device."""
    return tensor.device.type not in _asynchronous()


@functools.cache
def _asynchronous() -> frozenset[str]:
    accelerator = torch.accelerator.current_accelerator()
    return frozenset(() if accelerator is None else (accelerator.type,))


def inverse(scale: Tensor) -> Tensor:
    """Return 1 / scale as float32, computed in float64 where the device has it."""
    if _has_float64(scale.device):
        return scale.double().reciprocal().float()
    return scale.reciprocal()


@functools.cache
def _has_float64(device: torch.device) -> bool:
    try:
        torch.ones((), device=device).double().reciprocal()
    except (TypeError, RuntimeError):  # Metal refuses the dtype, some Intel GPUs the kernel
        return False
    return True


def unscale_bucket_(bucket: Bucket, found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiply gradients by ``inv_scale`` in place; set ``found_inf`` to 1 if any had an inf or NaN.

    Args:
        bucket: Gradients; DTensors of one mesh and of the same placements.
        found_inf: Shape [], float32, on their device; kept at 1 if it is 1. Reduced over a mesh that shards them.
        inv_scale: Shape [], float32, on their device.
    """
    if bucket.has_graph:
        _unscale_graph_(bucket, found_inf, inv_scale)
        return
    if bucket.mesh is not None and not _runs(bucket.device, bucket.dtype):
        local = list(map(local_part, bucket.tensors))
        unscale_bucket_(Bucket(bucket.device, bucket.dtype, local), found_inf, inv_scale)
        _reduce_over_mesh_(found_inf, bucket)
        return
    grads, dtype = bucket.tensors, bucket.dtype
    if dtype.is_complex:
        grads, dtype = list(map(_real_view, grads)), _REALS[dtype]
    if _runs(bucket.device, dtype):
        amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
    elif dtype in _LOW:
        _unscale_wide_(grads, bucket.device, found_inf, inv_scale)
    else:
        _check_and_unscale_(grads, found_inf, inv_scale)


def _unscale_graph_(bucket: Bucket, found_inf: Tensor, inv_scale: Tensor) -> None:
    """Unscale gradients that are part of a graph, within the graph: their derivatives are unscaled with them."""
    detached = [values_of(grad.detach()).clone() for grad in bucket.tensors]
    checked = Bucket(bucket.device, bucket.dtype, detached, bucket.mesh, bucket.placements, bucket.is_sparse)
    unscale_bucket_(checked, found_inf, torch.ones_like(inv_scale))
    wide = _WIDE.get(bucket.dtype, bucket.dtype)
    with torch.enable_grad():
        for grad in bucket.tensors:
            grad.copy_(grad.to(wide) * inv_scale)


def _runs(device: torch.device, dtype: torch.dtype) -> bool:
    return not dtype.is_complex and has_kernel(device.type, UNSCALE) and _takes(device, dtype)


@functools.cache
def _takes(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether the device's kernel takes a dtype; CUDA's has no bfloat16 in torch 2.11."""
    grad = torch.ones(1, dtype=dtype, device=device)
    found_inf = torch.zeros((), dtype=torch.float32, device=device)
    try:
        amp_foreach_non_finite_check_and_unscale_([grad], found_inf, torch.ones_like(found_inf))
    except NotImplementedError:
        return False
    return True


def _real_view(grad: Tensor) -> Tensor:
    # The conjugate of a lazily conjugated tensor is its memory as it is.
    return torch.view_as_real(grad.conj() if grad.is_conj() else grad)


def _unscale_wide_(grads: list[Tensor], device: torch.device, found_inf: Tensor, inv_scale: Tensor) -> None:
    """Unscale float32 copies: float16 may not hold the inverse of the scale. A few at a time, to save memory."""
    for start in range(0, len(grads), AT_ONCE):
        some = grads[start : start + AT_ONCE]
        wide = Bucket(device, torch.float32, [grad.float() for grad in some])
        unscale_bucket_(wide, found_inf, inv_scale)
        for grad, result in zip(some, wide.tensors, strict=True):
            grad.copy_(result)


def _check_and_unscale_(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    for grad in grads:
        is_bad = torch.isfinite(grad).all().logical_not().to(found_inf.dtype)
        found_inf.copy_(torch.maximum(found_inf, is_bad))
        grad.mul_(inv_scale)


def _reduce_over_mesh_(found_inf: Tensor, bucket: Bucket) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate

    placements = [Replicate() if p.is_replicate() else Partial("max") for p in bucket.placements]
    found_inf.copy_(DTensor.from_local(found_inf.clone(), bucket.mesh, placements, run_check=False).full_tensor())


def unless(skipped: Tensor, factor: Tensor) -> Tensor:
    """Return 1 for gradients that a fused kernel unscaled, and the factor if it skipped and left them scaled.

    Args:
        skipped: Shape []; 1 if it skipped.
        factor: Shape [], float32.
    """
    return torch.where(moved(skipped, factor.device) > 0, factor, torch.ones_like(factor))


def rescale_(scale: Tensor, grad: Tensor, skipped: Tensor | None) -> None:
    """Multiply an unscaled gradient by the scale, in place; one that a fused kernel has skipped is scaled already.

    Args:
        scale: Shape [], float32.
        grad: A gradient of any kind.
        skipped: Shape [], 1 if a fused kernel skipped; or None.
    """
    factor = scale if skipped is None else torch.where(skipped.to(scale.device) > 0, torch.ones_like(scale), scale)
    with torch.no_grad():
        for bucket in sort_gradients([grad]):
            found_inf = torch.zeros((), dtype=torch.float32, device=bucket.device)
            unscale_bucket_(bucket, found_inf, moved(factor, bucket.device))


def combine(found_infs: list[Tensor], device: torch.device) -> Tensor:
    """Return what is above 0 if an element of the tensors is: shape [], float32, on a device. Changes none of them.

    Args:
        found_infs: Of any shape and dtype: subclasses of the scaler have their own.
        device: Of the result.
    """
    found = [moved(flat(found_inf), device) for found_inf in found_infs]
    return found[0] if len(found) == 1 else torch.stack(found).amax()


def flat(value: Tensor) -> Tensor:
    """Return a float32 number as a tensor without a dimension; of several, or of another dtype, whether one is not 0.

    Example:
        >>> flat(torch.tensor([2.0])), flat(torch.tensor([False, True]))
        (tensor(2.), tensor(1.))
    """
    if value.dtype is torch.float32 and value.numel() == 1:
        return value.reshape(()) if value.dim() else value
    return value.bool().any().float()


def as_flag(found_inf: Tensor) -> Tensor:
    """Return 1 if an inf was found, else 0: fused kernels skip where it is exactly 1, which a sum over ranks isn't."""
    return found_inf.clamp(max=1.0)


def update_scale_(scale: Tensor, tracker: Tensor, found_inf: Tensor, rule: Rule) -> None:
    """Move the scale and the growth tracker in place, as ``ScaleState.next`` says.

    Args:
        scale: Shape [], float32.
        tracker: Shape [], int32.
        found_inf: Shape [], float32, on the same device; above 0 if an inf or NaN was found.
        rule: How they move.
    """
    if has_kernel(scale.device.type, UPDATE):
        amp_update_scale_(scale, tracker, found_inf, rule.growth_factor, rule.backoff_factor, rule.growth_interval)
    else:
        _update_scale_(scale, tracker, found_inf, rule)
    scale.clamp_(rule.min_scale, rule.max_scale)


def _update_scale_(scale: Tensor, tracker: Tensor, found_inf: Tensor, rule: Rule) -> None:
    found = found_inf > 0
    count = tracker + 1
    is_due = count >= rule.growth_interval
    grown = scale * rule.growth_factor
    kept = torch.where(is_due & torch.isfinite(grown), grown, scale)
    scale.copy_(torch.where(found, scale * rule.backoff_factor, kept))
    tracker.copy_(torch.where(found | is_due, torch.zeros_like(tracker), count))
