"""Finds out, once, whether this processor's kernels leave a convolution's weight gradient partly unwritten.

With AVX-512 bfloat16 units, the weight gradient of a 3 x 3 x 3 convolution with padding over a depth of two was
memory that nobody had written: inf, 1e35, or what an earlier call had left there.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import torch

__all__ = ["WeightGradient", "leaves_garbage", "weight_gradient"]

WeightGradient = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""What gives the weight's gradient of (output's gradient, input, weight), in their dtype."""

_CHANNELS = (4, 16)
_DEPTH = 2
_FACTORS = (1.0, -1.0, 0.5, -0.5, 0.25, -0.25)
"""What each call's result is multiplied by, so that none is right for another."""
_BLOCKS = 8


def weight_gradient(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the weight's gradient of ``conv3d(x, weight, padding=1)``, by torch's own kernel."""
    ones, needed = [1, 1, 1], [False, True, False]
    found = torch.ops.aten.convolution_backward(
        gradient, x, weight, None, ones, ones, ones, False, [0, 0, 0], 1, needed
    )
    return found[1]  # type: ignore[no-any-return]


def leaves_garbage(dtype: torch.dtype, compute: WeightGradient = weight_gradient) -> bool:
    """Tell whether ``compute`` in ``dtype`` leaves memory unwritten, or fails.

    What was there could be right by chance: so no two of its calls have the same result, freed memory of the same
    size is full of NaN, or of a number far off, before each, and all are compared with float32's. It runs on a
    thread of its own: no mode, autocast region or transform of the caller's reaches it. No random number is drawn.
    """
    found: list[bool] = []

    def run() -> None:
        with torch.inference_mode():
            found.append(any(_is_wrong(dtype, channels, compute) for channels in _CHANNELS))

    thread = threading.Thread(target=run, name="mpamp probe")
    thread.start()
    thread.join()
    return not found or found[0]


def _is_wrong(dtype: torch.dtype, channels: int, compute: WeightGradient) -> bool:
    x = _numbers(1, channels, _DEPTH, 5, 5)
    weight = _numbers(channels, channels, 3, 3, 3)
    whole = weight_gradient(x, x, weight)  # the output has the input's shape
    for factor in _FACTORS:
        gradient, expected = (x * factor).to(dtype), whole * factor
        _fill_freed_memory(expected.numel(), dtype, math.nan if factor > 0 else 3e4)
        try:
            result = compute(gradient, x.to(dtype), weight.to(dtype)).float()
        except RuntimeError:
            return True  # float32 serves it
        if not bool(((result - expected).abs() <= 0.05 * expected.abs().max()).all()):
            return True
    return False


def _fill_freed_memory(count: int, dtype: torch.dtype, value: float) -> None:
    """Have the next tensors of ``count`` elements, in ``dtype`` or float32, get memory full of ``value``."""
    dtypes = [dtype, torch.float32] * _BLOCKS
    blocks = [torch.full((count,), value, dtype=d, device="cpu") for d in dtypes]
    del blocks


def _numbers(*shape: int) -> torch.Tensor:
    """Return numbers between -1 and 1, exact in 16 bits, of no simple pattern."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count, device="cpu") * 37 % 31 - 15).to(torch.float32) / 16).reshape(shape)
