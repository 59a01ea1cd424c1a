"""The cross entropy of class indices as one kernel forward and one backward, with no copy of the logits in float32."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from typing import TYPE_CHECKING, Any

import torch

from ...devices.registry import is_capturing
from ...errors import MpampWarning
from ...rules.policy import CASTABLE
from ...torch_internals import (
    DispatchKey,
    dispatch_tls_is_dispatch_key_included,
    forward_ad_level,
    is_legacy_batchedtensor,
    is_tracing,
    len_torch_dispatch_stack,
    peek_interpreter_stack,
)
from ..compiling import is_dynamo_compiling

if TYPE_CHECKING:
    from ...plugins.backend import Backend

__all__ = ["MINIMUM", "cross_entropy", "gradient"]

MINIMUM = 2**25
"""Logits from which on the kernels are taken: below, the host's time for their launch is more than what they save."""
_NONE, _MEAN = 0, 1
_EXACT = (torch.Tensor, torch.nn.Parameter)
_dispatch_modes = len_torch_dispatch_stack
_transform = peek_interpreter_stack
_is_batched = is_legacy_batchedtensor
_is_included = dispatch_tls_is_dispatch_key_included
_PRE_DISPATCH = DispatchKey.PreDispatch
"""On while ops are recorded above the Autocast keys, for ``torch.export``."""


def cross_entropy(
    backend: Backend,
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """Return ``cross_entropy(logits.float(), target, ...)`` in float32, or None where torch's own ops have to run.

    Args:
        backend: That of the device.
        logits: (N, C), or (N, C, ...) with the classes innermost in memory, float16 or bfloat16.
        target: (N, ...) in int64.
        weight: (C,), or None.
        reduction: torch's number: 0 none, 1 mean, 2 sum.
        ignore_index: The target that doesn't count.
        label_smoothing: From 0 to 1.
    """
    if logits.dtype is torch.float32 or not _is_plain(logits) or logits.numel() < MINIMUM:
        return None
    if not _fits(backend, logits, target, weight, label_smoothing):
        return None
    if is_capturing(logits.device.type) or not _works(logits.device, logits.dtype):
        return None
    targets = target.reshape(-1).contiguous()
    weights = None if weight is None else weight.to(torch.float32).contiguous()
    if logits.requires_grad and torch.is_grad_enabled():
        settings = reduction, ignore_index, label_smoothing
        loss = _CrossEntropy.apply(logits, targets, weights, *settings)  # type: ignore[no-untyped-call]
    else:
        loss, *_ = _forward(logits, targets, weights, reduction, ignore_index, label_smoothing)
    return loss.view(target.shape) if reduction == _NONE else loss  # type: ignore[no-any-return]


# -- Which calls ---------------------------------------------------------------------------------------


def _fits(
    backend: Backend, logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, smoothing: float
) -> bool:
    """Tell whether the kernels take arguments like these; what torch refuses they don't take either."""
    tensors = [logits, target] if weight is None else [logits, target, weight]
    on_device = backend.tensor_check()
    return (
        all(type(t) in _EXACT and t.layout is torch.strided and t.device == logits.device for t in tensors)
        and on_device(logits)
        and logits.dtype in CASTABLE
        and logits.dim() >= 2
        and _rows(logits) is not None
        and target.dtype is torch.int64
        and target.shape == (logits.shape[0], *logits.shape[2:])
        and 0 <= smoothing <= 1
        and (weight is None or _is_weight(weight, logits.shape[1]))
    )


def _is_weight(weight: torch.Tensor, classes: int) -> bool:
    return weight.dtype in CASTABLE and weight.shape == (classes,) and not weight.requires_grad


def _rows(logits: torch.Tensor) -> torch.Tensor | None:
    """Return the logits as (N, C) with the classes beside each other, or None where that would be a copy."""
    if logits.dim() == 2:
        return logits if logits.stride(1) == 1 else None
    rows = logits.movedim(1, -1)
    return rows.view(-1, logits.shape[1]) if rows.is_contiguous() else None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a call is neither traced, transformed, watched by a mode nor under forward-mode AD."""
    return (
        type(tensor) in _EXACT
        and not _dispatch_modes()
        and not _is_included(_PRE_DISPATCH)
        and _transform() is None
        and not _is_batched(tensor)  # of ``is_grads_batched``
        and not is_tracing()
        and forward_ad_level() < 0
    )


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _works(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether Triton is there and can make kernels for a device, which takes a C compiler and a driver."""
    if not _has_triton():
        return False
    rows = torch.zeros(1, 2, dtype=dtype, device=device)
    targets = torch.zeros(1, dtype=torch.int64, device=device)
    try:
        losses, _, tops, log_sums = _kernels().forward(rows, targets, None, -100, 0.0)
        _kernels().backward(rows, targets, None, losses, tops, log_sums, -100, 0.0)
    except Exception as error:  # whatever a compiler, its driver or a C compiler that is missing raises
        warnings.warn(
            f"Triton can't make kernels for {device}, so losses are computed from a float32 copy of their arguments: "
            f"{type(error).__name__}: {error}. MPAMP_FUSED_LOSS=0 has mpamp not try.",
            MpampWarning,
            stacklevel=2,
        )
        return False
    return True


@functools.cache
def _kernels() -> Any:
    return importlib.import_module(".kernels", __package__)


# -- The function --------------------------------------------------------------------------------------


def _forward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    smoothing: float,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Return the loss, what its mean was divided by, and what the gradient needs of each row."""
    losses, used, tops, log_sums = _kernels().forward(_rows(logits), targets, weights, ignore_index, smoothing)
    if reduction == _NONE:
        return losses.clone(), None, tops, log_sums  # apart from what is kept beside it
    total = used.sum() if reduction == _MEAN else None
    loss = losses.sum()
    return loss if total is None else loss / total, total, tops, log_sums


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logits as they are, and two numbers of each row."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor | None,
        reduction: int,
        ignore_index: int,
        smoothing: float,
    ) -> torch.Tensor:
        loss, total, tops, log_sums = _forward(logits, targets, weights, reduction, ignore_index, smoothing)
        ctx.save_for_backward(logits, targets, weights, total, tops, log_sums)
        ctx.settings = ignore_index, smoothing
        return loss

    @staticmethod
    def backward(ctx: Any, *upstreams: torch.Tensor) -> Any:
        logits, targets, weights, total, tops, log_sums = ctx.saved_tensors
        (upstream,) = upstreams
        with torch.autocast(logits.device.type, enabled=False):
            g = upstream if total is None else upstream / total
            is_simple = not is_dynamo_compiling() and not torch.is_grad_enabled() and _is_plain(upstream)
            rows = _rows(logits) if is_simple else None  # a hook may have unpacked them otherwise than they were
            if rows is None:
                result = gradient(logits, targets, weights, g, *ctx.settings)
            else:
                grad = _kernels().backward(rows, targets, weights, g, tops, log_sums, *ctx.settings)
                result = _like(logits, grad)
        return result, None, None, None, None, None


def _like(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return (N, C) in the shape of the logits."""
    return rows.view(logits.movedim(1, -1).shape).movedim(-1, 1)


def gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor | None,
    upstream: torch.Tensor,
    ignore_index: int,
    smoothing: float,
) -> torch.Tensor:
    """Return the gradient of the logits by torch's ops, which have gradients and transforms of their own.

    Args:
        logits: (N, C, ...), in any floating dtype.
        targets: As many class indices.
        weights: (C,), or None.
        upstream: The gradient of the sum of the rows' losses, 0-dim, or of each row's, (N * ...,).
        ignore_index: The target that doesn't count.
        smoothing: From 0 to 1.

    Example:
        >>> gradient(torch.zeros(1, 2), torch.tensor([1]), None, torch.tensor(1.0), -100, 0.0)
        tensor([[ 0.5000, -0.5000]])
    """
    classes = logits.shape[1]
    log_p = logits.movedim(1, -1).reshape(-1, classes).float().log_softmax(-1)
    is_used = (targets != ignore_index).unsqueeze(1)
    is_target = torch.arange(classes, device=targets.device) == targets.unsqueeze(1)
    w = torch.ones(classes, device=logits.device) if weights is None else weights
    # How much each log-probability counts: (N, C).
    counts = w * torch.where(is_target, (1 - smoothing) + smoothing / classes, smoothing / classes)
    of_log_p = torch.where(is_used, -upstream.reshape(-1, 1) * counts, 0.0)
    result = of_log_p - log_p.exp() * of_log_p.sum(-1, keepdim=True)
    return _like(logits, result.to(logits.dtype))
