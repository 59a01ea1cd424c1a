"""The part of the scaler that scales losses, and unscales and checks gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ..engine.compiling import left_to_python
from . import gradients, kernels
from .outputs import map_tensors
from .settings import ScalerSettings

__all__ = ["UnscalingPart"]

Optimizer = torch.optim.Optimizer


class UnscalingPart(ScalerSettings):
    """Losses in, unscaled gradients out; whether there was an inf or NaN is kept on the device."""

    _is_sharded = False
    """Whether no process group means all ranks, as it does for torch's ShardedGradScaler."""

    @left_to_python
    def scale(self, outputs: Any) -> Any:
        """Return losses multiplied by the scale: a tensor, or tensors in nested containers, whose classes are kept.

        Example:
            >>> from mpamp.scaler import GradScaler
            >>> GradScaler("cpu", init_scale=4.0).scale({"loss": torch.tensor(1.5)})
            {'loss': tensor(6.)}
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            scale = self._scale_for(outputs)
            return self._watched(outputs * kernels.moved(scale, outputs.device))
        copies: list[kernels.Copies] = []

        def scaled(tensor: Tensor) -> Tensor:
            if not copies:
                copies.append(kernels.Copies(self._scale_for(tensor)))
            return self._watched(tensor * copies[0].at(tensor.device))

        return map_tensors(scaled, outputs)

    def _watched(self, loss: Tensor) -> Tensor:
        assert self._scale is not None
        self._ledger.begin(self._per_optimizer_states)
        self._ledger.passes.watch(loss, self._scale, kernels.rescale_)
        return loss

    def _scale_for(self, tensor: Tensor) -> Tensor:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(tensor.device)
        assert self._scale is not None
        return self._scale

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        assert self._scale is not None
        self._history.place(self._scale.device)

    @left_to_python
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place, and note whether one has an inf or NaN.

        Call it before gradients are clipped or looked at; otherwise ``step`` does it. A gradient that another
        optimizer owns too is unscaled once. Gradients that come later, by a backward pass of a scaled loss, are
        unscaled by another call, or by ``step``. Does not wait for the device.

        Raises:
            RuntimeError: It was called for this optimizer since the last update, and no gradient has come since; or
                it comes after its step.
            Fp16GradientError: There are float16 gradients, and ``allow_fp16_grads`` is off. None is touched then.
            ScalerUsageError: Whether a gradient is scaled can't be known.
            AssertionError: Nothing was scaled yet.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("unscale_")
        state = self._state_of(optimizer)
        if self.is_unscaled(optimizer):
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
        found = self._unscale_grads_(optimizer, kernels.inverse(scale), found_inf, self._allow_fp16_grads)
        state["found_inf_per_device"] = _either(state["found_inf_per_device"], self._on_all_ranks(found))
        self._ledger.record(optimizer, state)
        state["stage"] = OptState.UNSCALED

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Tell whether ``unscale_`` has been called for an optimizer, and no gradient has come since.

        False after its step, and if scaling is disabled.

        Example:
            >>> from mpamp.scaler import GradScaler
            >>> weight = torch.ones(1, requires_grad=True)
            >>> optimizer, scaler = torch.optim.SGD([weight]), GradScaler("cpu")
            >>> scaler.scale(weight.sum()).backward()
            >>> scaler.unscale_(optimizer)
            >>> scaler.is_unscaled(optimizer)
            True
            >>> scaler.scale(weight.sum()).backward()
            >>> scaler.is_unscaled(optimizer)
            False
        """
        if not self._enabled:
            return False
        state = self._state_of(optimizer)
        return state["stage"] is OptState.UNSCALED and not self._ledger.has_late(optimizer)

    def _state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._ledger.open(self._per_optimizer_states, optimizer)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = kernels.Copies(found_inf)
        with torch.no_grad():
            scaled, unscaled = self._ledger.split(optimizer)
            buckets = gradients.sort_gradients(scaled)
            if not allow_fp16:
                gradients.check_dtypes(optimizer, buckets)
            elif any(bucket.may_overflow_when_merged for bucket in buckets):
                gradients.merge_duplicates_(optimizer)
                scaled, unscaled = self._ledger.split(optimizer)
                buckets = gradients.sort_gradients(scaled)
            _unscale_(buckets, found, inv_scale)
            for skipped, grads in unscaled:
                factor = torch.ones_like(inv_scale) if skipped is None else kernels.unless(skipped, inv_scale)
                _unscale_(gradients.sort_gradients(grads), found, factor)
        return found.by_device

    def _check_inf_per_device(self, optimizer: Optimizer) -> Any:
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        one = torch.ones((), dtype=torch.float32, device=scale.device)
        found = self._on_all_ranks(self._unscale_grads_(optimizer, one, torch.zeros_like(one), True))
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        return found

    def _finds_by_itself(self) -> bool:
        """Tell whether what ``_check_inf_per_device`` returns is 0 or 1: a subclass may return a sum over ranks."""
        methods = (self._check_inf_per_device, self._unscale_grads_)
        own = (UnscalingPart._check_inf_per_device, UnscalingPart._unscale_grads_)
        return all(getattr(m, "__func__", None) is f for m, f in zip(methods, own, strict=True))

    def _on_all_ranks(self, found: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        """Return what was found on any rank of the process group, also by a rank that has no gradient itself."""
        is_reduced = self.process_group is not None or (self._is_sharded and torch.distributed.is_initialized())
        if not is_reduced:
            return found
        scale, _ = self._check_scale_growth_tracker("step")
        combined = kernels.combine(list(found.values()), scale.device)
        torch.distributed.all_reduce(combined, op=torch.distributed.ReduceOp.MAX, group=self.process_group)
        return {scale.device: combined}


def _unscale_(buckets: list[gradients.Bucket], found: kernels.Copies, factor: Tensor) -> None:
    factors = kernels.Copies(factor)
    for bucket in buckets:
        kernels.unscale_bucket_(bucket, found.at(bucket.device), factors.at(bucket.device))


def _either(before: dict[torch.device, Tensor], found: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
    both = {device: torch.maximum(before[device], found[device]) for device in before.keys() & found.keys()}
    return {**before, **found, **both}
