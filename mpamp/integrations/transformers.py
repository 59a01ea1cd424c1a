"""The Hugging Face Trainer with mpamp's region and scaler: ``fp16=True`` and ``bf16=True`` mean the same on every device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import convert_outputs_to_fp32
from transformers import Trainer

from ..regions.region import Region, autocast
from ..scaler import GradScaler

__all__ = ["MpampTrainer", "MpampTrainerMixin"]

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_OF_THEIR_OWN = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
"""Engines that see to precision themselves."""


class MpampTrainerMixin:
    """Put before ``Trainer``, or any class made of it: forward passes run in ``mpamp.autocast``, steps go by mpamp's scaler.

    ``TrainingArguments`` say which: ``bf16=True``, or ``fp16=True`` with the scaler, on the CPU too, where the Trainer's
    own ``fp16`` does nothing. The Trainer's loop, its clipping, accumulation and checkpoints stay as they are; a
    checkpoint of a plain Trainer is resumed. Models return float32, as the Trainer's do. DeepSpeed and Megatron-LM see
    to precision themselves: with them nothing changes.

    Args:
        args: As the Trainer's.
        ops: Rules for ops, as those of ``mpamp.autocast``.
        scaler_options: Arguments of ``mpamp.GradScaler``, such as ``{"init_scale": 1024.0}``.
        kwargs: As the Trainer's.
    """

    accelerator: Any
    args: Any

    def __init__(
        self, *args: Any, ops: Any = None, scaler_options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._mpamp_ops = ops
        self._mpamp_scaler_options = dict(scaler_options or {})
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, as the Trainer does, and have it use mpamp."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        dtype = _DTYPES.get(self.args.mixed_precision)
        if dtype is not None and self.accelerator.distributed_type not in _OF_THEIR_OWN:
            _adopt(self.accelerator, dtype, self._mpamp_ops, self._mpamp_scaler_options)


class MpampTrainer(MpampTrainerMixin, Trainer):
    """A ``transformers.Trainer`` in mpamp: ``MpampTrainer(model, args, train_dataset=..., ops={"softmax": "fp32"})``.

    The arguments are the Trainer's, and those of ``MpampTrainerMixin``.
    """


def _adopt(accelerator: Any, dtype: torch.dtype, ops: Any, scaler_options: dict[str, Any]) -> None:
    """Make an accelerator that is there one of ours: the Trainer has no place to hand one in."""
    accelerator.__class__ = _MpampAccelerator
    accelerator.native_amp = False  # of torch's autocast
    accelerator.mpamp_region = autocast(accelerator.device, dtype=dtype, ops=ops)
    accelerator.scaler = None
    if dtype is torch.float16:
        if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
            scaler_options = {"process_group": torch.distributed.group.WORLD, **scaler_options}
        accelerator.scaler = GradScaler(accelerator.device, **scaler_options)


class _MpampAccelerator(Accelerator):
    mpamp_region: Region

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        forward = model.forward
        if not (getattr(model, "_is_accelerate_prepared", False) or hasattr(model, "_original_forward")):
            model._original_forward = forward  # where accelerate looks for it, to unwrap the model
            function = getattr(forward, "__func__", None)
            if function is None:
                model.forward = convert_outputs_to_fp32(self.mpamp_region(forward))
            else:
                model.forward = MethodType(convert_outputs_to_fp32(self.mpamp_region(function)), model)
        return super().prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if type(prepared) is AcceleratedOptimizer and prepared.scaler is not None:
            prepared.__class__ = _MpampOptimizer
        return prepared

    def unscale_gradients(self, optimizer: Any = None) -> None:
        if self.scaler is None:
            return
        given = self._optimizers if optimizer is None else optimizer
        for each in given if isinstance(given, tuple | list) else [given]:
            while isinstance(each, AcceleratedOptimizer):
                each = each.optimizer
            self.scaler.unscale_(each)

    @contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        is_on = autocast_handler is None or autocast_handler.enabled
        region = self.mpamp_region if is_on else autocast(self.device, enabled=False)
        with region:
            yield


class _MpampOptimizer(AcceleratedOptimizer):
    @property
    def step_was_skipped(self) -> bool:
        """Whether the scaler skipped; accelerate's own looks whether ``step`` was called, as a fused one's always is."""
        return bool(self.scaler.last_step_skipped(self.optimizer))
