"""mpamp's precision plugins for `pytorch_lightning` and `lightning_fabric`: one line in a Trainer or a Fabric.

Example:
    >>> from pytorch_lightning import Trainer
    >>> plugin = MpampPrecision("bf16-mixed", ops={"softmax": "fp32"})
    >>> trainer = Trainer(plugins=[plugin], accelerator="cpu", logger=False, enable_checkpointing=False)
    >>> trainer.precision_plugin is plugin
    True
    >>> from lightning_fabric import Fabric
    >>> fabric = Fabric(plugins=[MpampFabricPrecision("bf16-mixed")], accelerator="cpu")
    >>> with fabric.autocast():
    ...     print(torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype)
    torch.bfloat16
"""

from __future__ import annotations

import torch
from lightning_fabric.plugins import MixedPrecision as FabricMixedPrecision
from pytorch_lightning.plugins import MixedPrecision, Precision

from .lightning_parts import FabricPart, TrainerPart

__all__ = ["MpampFabricPrecision", "MpampPrecision"]


class MpampPrecision(TrainerPart, MixedPrecision):
    __doc__ = TrainerPart.__doc__
    _integration, _other = "pytorch_lightning", "lightning"

    def _clip(self, optimizer: torch.optim.Optimizer, *args: float | str) -> None:
        Precision.clip_gradients(self, optimizer, *args)


class MpampFabricPrecision(FabricPart, FabricMixedPrecision):
    __doc__ = FabricPart.__doc__
    _integration, _other = "pytorch_lightning", "lightning"
