"""``apex.amp.lists.torch_overrides``: what O1 casts of ``torch``."""

import torch

from .shown import Shown

__all__ = ["CASTS", "FP16_FUNCS", "FP32_FUNCS", "MODULE", "SEQUENCE_CASTS"]

MODULE = torch

FP16_FUNCS = Shown(
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc prelu addmm addmv addr matmul mm "
    "mv addbmm baddbmm bmm",
)
FP32_FUNCS = Shown(
    "acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum dist norm prod std "
    "sum var renorm",
)
CASTS = Shown("addcdiv addcmul atan2 cross bilinear dot add div mul eq equal ge gt le lt ne")
SEQUENCE_CASTS = Shown("cat stack")
