"""Triton kernels of the cross entropy: 16-bit logits are read, all is in float32, the gradient is rounded once.

Loaded by the first loss that takes them, for Triton need not be there.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["backward", "forward"]

FORWARD, BACKWARD = (4096, 4), (2048, 16)
"""How many classes a program takes at a time, and its warps: the best of 15 sizes on an H200."""


@triton.jit
def _forward(
    logits, targets, weights, losses, used, tops, log_sums,
    stride, classes, ignore_index, keep, share,
    HAS_WEIGHTS: tl.constexpr, SMOOTHS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program a row. -log p[c] = log_sum - (x[c] - top), with log_sum = log(sum(exp(x - top))).
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    top = float("-inf")
    total = 0.0  # of exp(x - shift)
    shift = 0.0  # top, but for a row of nothing but -inf so far
    spread = 0.0  # of w * (x - shift)
    weight_sum = 0.0
    for start in range(0, classes, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        is_in = columns < classes
        x = tl.load(logits + columns, mask=is_in, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, 0))
        new_shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - new_shift) + tl.sum(tl.exp(x - new_shift), 0)
        if SMOOTHS:
            w = tl.where(is_in, 1.0, 0.0)
            if HAS_WEIGHTS:
                w = tl.load(weights + columns, mask=is_in, other=0.0)
            spread += weight_sum * (shift - new_shift) + tl.sum(tl.where(is_in, w * (x - new_shift), 0.0), 0)
            weight_sum += tl.sum(w, 0)
        top = new_top
        shift = new_shift
    log_sum = tl.log(total)

    target = tl.load(targets + row)
    is_used = target != ignore_index
    is_class = (target >= 0) & (target < classes)
    tl.device_assert(is_class | (target == ignore_index), "cross_entropy: a target is not a class")
    x = tl.load(logits + target, mask=is_used & is_class, other=0.0).to(tl.float32)
    weight = 1.0
    if HAS_WEIGHTS:
        weight = tl.load(weights + target, mask=is_used & is_class, other=0.0)
    loss = keep * (weight * ((shift - x) + log_sum))
    if SMOOTHS:
        loss += share * (weight_sum * log_sum - spread)
    tl.store(losses + row, tl.where(is_used, loss, 0.0))
    tl.store(used + row, tl.where(is_used, weight, 0.0))
    tl.store(tops + row, shift)
    tl.store(log_sums + row, log_sum)


@triton.jit
def _backward(
    logits, targets, weights, weight_sum, upstream, tops, log_sums, gradient,
    stride, upstream_stride, classes, ignore_index, keep, share,
    HAS_WEIGHTS: tl.constexpr, SMOOTHS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program a row and block. With d the gradient of the log-probabilities, that of x is d - p * sum(d).
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < classes
    target = tl.load(targets + row)
    log_sum = tl.load(log_sums + row)
    # An ignored row's is zero, or nan where its probabilities are.
    result = tl.zeros([BLOCK], tl.float32) * log_sum
    if target != ignore_index:
        g = tl.load(upstream + row * upstream_stride)
        hit = keep * g
        if HAS_WEIGHTS:
            hit *= tl.load(weights + target)
        x = tl.load(logits + row * stride + columns, mask=is_in, other=0.0).to(tl.float32)
        p = tl.exp(x - tl.load(tops + row) - log_sum)
        if SMOOTHS:
            if HAS_WEIGHTS:
                spread = share * g * tl.load(weights + columns, mask=is_in, other=0.0)
                result = p * (hit + share * g * tl.load(weight_sum)) - spread
            else:
                result = p * (hit + share * g * classes) - share * g
        else:
            result = p * hit
        result = tl.where(columns == target, result - hit, result)
    tl.store(gradient + row * classes + columns, result.to(gradient.dtype.element_ty), mask=is_in)


def forward(
    rows: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None, ignore_index: int, smoothing: float
) -> tuple[torch.Tensor, ...]:
    """Return each row's loss, the weight of its target (0 if ignored), its maximum and log(sum(exp(x - maximum))).

    Args:
        rows: (N, C) in float16 or bfloat16, classes beside each other.
        targets: (N,) in int64, contiguous.
        weights: (C,) in float32, contiguous.
        ignore_index: The target of rows that don't count.
        smoothing: From 0 to 1.
    """
    count, classes = rows.shape
    losses, used, tops, log_sums = torch.empty((4, count), dtype=torch.float32, device=rows.device).unbind()
    block, warps = FORWARD
    with _on(rows.device):
        _forward[(count,)](
            rows, targets, weights, losses, used, tops, log_sums,
            rows.stride(0), classes, ignore_index, 1 - smoothing, smoothing / classes,
            HAS_WEIGHTS=weights is not None, SMOOTHS=smoothing > 0, BLOCK=block, num_warps=warps, **_OPTIONS,
        )  # fmt: skip
    return losses, used, tops, log_sums


def backward(
    rows: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor | None,
    upstream: torch.Tensor,
    tops: torch.Tensor,
    log_sums: torch.Tensor,
    ignore_index: int,
    smoothing: float,
) -> torch.Tensor:
    """Return the gradient of the logits, (N, C) in their dtype; ``upstream`` is float32, for all rows or for each."""
    count, classes = rows.shape
    gradient = torch.empty((count, classes), dtype=rows.dtype, device=rows.device)
    block, warps = BACKWARD
    with _on(rows.device):
        _backward[(count, triton.cdiv(classes, block))](
            rows, targets, weights, None if weights is None else weights.sum(), upstream, tops, log_sums, gradient,
            rows.stride(0), upstream.stride(0) if upstream.dim() else 0, classes,
            ignore_index, 1 - smoothing, smoothing / classes,
            HAS_WEIGHTS=weights is not None, SMOOTHS=smoothing > 0, BLOCK=block, num_warps=warps, **_OPTIONS,
        )  # fmt: skip
    return gradient


_OPTIONS: dict[str, Any] = {"debug": torch.version.hip is None, "sanitize_overflow": False}
"""``debug`` is what has Triton keep an assertion; on ROCm it has none, nor has torch's own kernel."""


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a device current, for Triton launches on that one."""
    if device.index is None:
        return contextlib.nullcontext()
    return getattr(torch, device.type).device(device.index)  # type: ignore[no-any-return]
