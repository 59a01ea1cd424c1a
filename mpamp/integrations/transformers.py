"""The Hugging Face Trainer with mpamp's region and scaler: ``fp16=True`` and ``bf16=True`` on every device.

Example:
    >>> args = transformers.TrainingArguments("out", use_cpu=True, bf16=True, report_to=[])
    >>> trainer = MpampTrainer(torch.nn.Linear(2, 2), args, ops={"softmax": "fp32"})
    >>> with trainer.accelerator.autocast():
    ...     print(trainer.model(torch.ones(1, 2)).dtype)
    torch.bfloat16
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers

from ..rules.optable import OpTable
from .accelerate import Accelerator

__all__ = ["MpampTrainer", "MpampTrainerMixin"]


class MpampTrainerMixin:
    """Put before ``Trainer`` or a class made of it: forward passes run in ``mpamp.autocast``, steps by mpamp's scaler.

    ``TrainingArguments`` say which: ``bf16=True``, or ``fp16=True`` with the scaler, on the CPU too, where the
    Trainer's own ``fp16`` does nothing. Its loop, clipping, accumulation and checkpoints stay as they are, and a
    checkpoint of a plain Trainer is resumed. Models return float32, as the Trainer's do. DeepSpeed and Megatron-LM
    see to precision themselves: with them nothing changes.

    Args:
        args: As the Trainer's.
        ops: Rules for ops, as those of ``mpamp.autocast``.
        persistent_cache: Whether casts of weights outlive a region, as of ``mpamp.autocast``.
        scaler: For float16. None: a ``mpamp.GradScaler`` for the Trainer's device.
        kwargs: As the Trainer's.

    Raises:
        ValueError: A scaler is given, and ``fp16`` isn't.
        UnknownDeviceError, UnsupportedDtypeError, OpTableError: As ``mpamp.autocast``.
    """

    accelerator: Any

    def __init__(
        self,
        *args: Any,
        ops: Mapping[str, Any] | OpTable | None = None,
        persistent_cache: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        **kwargs: Any,
    ) -> None:
        self._for_mpamp = ops, persistent_cache, scaler
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, as the Trainer does, and make it mpamp's: there is no place to hand one in."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.__class__ = Accelerator
        self.accelerator._use_mpamp(*self._for_mpamp)


class MpampTrainer(MpampTrainerMixin, transformers.Trainer):
    """A ``transformers.Trainer`` in mpamp.

    The arguments are the Trainer's, and those of ``MpampTrainerMixin``.
    """
