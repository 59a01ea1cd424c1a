"""Finds out, once, what this processor's kernels can't do in lower precision: which fail, and which give garbage.

With AVX-512 bfloat16 units, the weight gradient of a 3 x 3 x 3 convolution with padding over a depth of two was
memory that nobody had written: inf, 1e35, or what an earlier call had left there. oneDNN has some primitives for some
processors only, and one for inference may be there where the one for training isn't: the float16 LSTM with AMX.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

import torch

from ...probing import probing

__all__ = ["KERNELS", "Steps", "WeightGradient", "fails", "leaves_garbage", "weight_gradient"]

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
    size is full of NaN, or of a number far off, before each, and all are compared with float32's. No mode, autocast
    region or transform of the caller's reaches it. No random number is drawn.
    """
    with probing():
        return any(_is_wrong(dtype, channels, compute) for channels in _CHANNELS)


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


# -- Kernels that may be missing -----------------------------------------------------------------------

Steps = Callable[[torch.dtype], None]
"""Runs an op in a dtype for inference, and for training with its derivative, by torch's kernels alone."""


def fails(steps: Iterable[Steps], dtype: torch.dtype) -> bool:
    """Tell whether a kernel is missing: whether any of the steps raises in ``dtype``.

    Example:
        >>> any(fails(steps, torch.float32) for steps in KERNELS.values())
        False
    """
    with probing():
        try:
            for step in steps:
                step(dtype)
        except RuntimeError:
            return True
    return False


def _lstm(dtype: torch.dtype) -> None:
    x, hidden = _numbers(3, 2, 4).to(dtype), _numbers(1, 2, 8).to(dtype)
    weights = [t.to(dtype) for t in (_numbers(32, 4), _numbers(32, 8), _numbers(32), _numbers(32))]
    layer = functools.partial(torch.ops.aten.mkldnn_rnn_layer.default, x, *weights, hidden, hidden, False, [])
    mode, sizes = 2, (8, 1, True)  # an LSTM of 8 features and one layer, with biases
    layer(mode, *sizes, False, False, False)
    with torch.enable_grad():  # else torch takes no training for one
        y, h, c, workspace = layer(mode, *sizes, False, False, True)
    torch.ops.aten.mkldnn_rnn_layer_backward(
        *(x, *weights, hidden, hidden, y, h, c, y, h, c), False, mode, *sizes, True, False, [], False, workspace
    )


def _convolution(dims: int, is_transposed: bool, dtype: torch.dtype) -> None:
    x, weight = _numbers(1, 4, *[5] * dims).to(dtype), _numbers(4, 4, *[3] * dims).to(dtype)
    ones, zeros = [1] * dims, [0] * dims
    y = torch.ops.aten.convolution(x, weight, weight.flatten()[:4], ones, ones, ones, is_transposed, zeros, 1)
    needed = [True, True, True]
    torch.ops.aten.convolution_backward(y, x, weight, [4], ones, ones, ones, is_transposed, zeros, 1, needed)


def _products(dtype: torch.dtype) -> None:
    a = _numbers(8, 8).to(dtype)
    torch.ops.aten.addmm(a[0], a, a)
    torch.ops.aten.mm(a, a.t())
    torch.ops.aten.baddbmm(a[None], a[None], a[None].mT)
    torch.ops.aten.addmv(a[0], a, a[0])


KERNELS: dict[str, tuple[Steps, ...]] = {
    "mkldnn_rnn_layer": (_lstm,),
    **{f"conv{n}d": (functools.partial(_convolution, n, False),) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": (functools.partial(_convolution, n, True),) for n in (1, 2, 3)},
    "@matmul": (_products,),
}
"""By the rule that names them, the ops that go to oneDNN's primitives in lower precision."""
