"""apex.optimizers: its fused optimizers over torch's, with apex's arguments, defaults and arithmetic."""

from ..fp16_utils.optimizer import FP16_Optimizer
from .adam import FusedAdam
from .layerwise import FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad
from .sgd import FusedAdagrad, FusedSGD

__all__ = [
    "FP16_Optimizer",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedSGD",
]
