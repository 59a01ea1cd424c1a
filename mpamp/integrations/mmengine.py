"""MMEngine's ``AmpOptimWrapper`` with mpamp's region and scaler: registered as ``MpampOptimWrapper``, on any device.

In a config, ``custom_imports = dict(imports=["mpamp.integrations.mmengine"])`` and
``optim_wrapper = dict(type="MpampOptimWrapper", ...)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS

from ..regions.region import autocast
from ..scaler import GradScaler

__all__ = ["MpampOptimWrapper"]


@OPTIM_WRAPPERS.register_module()
class MpampOptimWrapper(AmpOptimWrapper):
    """An ``AmpOptimWrapper`` whose forward pass runs in ``mpamp.autocast`` and whose scaler is ``mpamp.GradScaler``.

    Accumulation, clipping, logging of the gradients' norm, and what is saved are MMEngine's own; a checkpoint of either
    wrapper loads into the other.

    Args:
        loss_scale: ``"dynamic"``, a number for a scale that stays, or the arguments of ``mpamp.GradScaler``.
        dtype: What lower-precision ops run in, a ``torch.dtype`` or its name. None is the device's default: float16 on
            CUDA, bfloat16 on XPU and the CPU.
        use_fsdp: Whether the model is an FSDP1 model: then all ranks skip a step if one has an inf or NaN.
        device: Device type. None is that of the optimizer's first parameter.
        ops: Rules for ops, as those of ``mpamp.autocast``.
        others: As those of ``OptimWrapper``: ``optimizer``, ``accumulative_counts``, ``clip_grad``.

    Raises:
        TypeError: ``loss_scale`` is none of these.
        UnsupportedDtypeError: The device can't run regions in ``dtype``.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> wrapper = MpampOptimWrapper(optimizer=optimizer, dtype="bfloat16")
        >>> with wrapper.optim_context(model):
        ...     output = model(torch.ones(4, 2))
        >>> wrapper.update_params(output.sum())
        >>> output.dtype
        torch.bfloat16
    """

    def __init__(
        self,
        loss_scale: str | float | dict[str, Any] = "dynamic",
        dtype: str | torch.dtype | None = None,
        use_fsdp: bool = False,
        *,
        device: str | torch.device | None = None,
        ops: Any = None,
        **others: Any,
    ) -> None:
        OptimWrapper.__init__(self, **others)  # not AmpOptimWrapper's, which refuses a machine without a GPU
        if device is None:
            device = self.optimizer.param_groups[0]["params"][0].device
        self.cast_dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        self._region = autocast(device, dtype=self.cast_dtype, ops=ops)
        options = _scaler_options(loss_scale)
        self._scale_update_param = options["init_scale"] if not isinstance(loss_scale, str | dict) else None
        if use_fsdp:
            options.setdefault("process_group", torch.distributed.group.WORLD)
        self.loss_scaler = GradScaler(self._region.device_type, **options)

    @contextmanager
    def optim_context(self, model: torch.nn.Module) -> Iterator[None]:
        """Run the forward pass in mpamp's region, without synchronizing gradients that are only accumulated."""
        with OptimWrapper.optim_context(self, model), self._region:
            yield


def _scaler_options(loss_scale: Any) -> dict[str, Any]:
    if loss_scale == "dynamic":
        return {}
    if isinstance(loss_scale, dict):
        return dict(loss_scale)
    if isinstance(loss_scale, int | float) and not isinstance(loss_scale, bool):
        return {"init_scale": float(loss_scale)}
    raise TypeError(f'loss_scale must be of type float, dict, or "dynamic", but got {loss_scale}')
