"""apex's loss scaler: its rule as a pure function, and the object around it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import MpampWarning
from ..scaler.gradients import sort_gradients
from ..scaler.kernels import unscale_bucket_
from ..scaler.state import MIN_SCALE
from .masters import LOW
from .state import say

__all__ = ["LossScaler", "next_scale"]

SCALE_FACTOR = 2.0


def next_scale(
    scale: float, unskipped: int, overflow: bool, window: int, least: float | None, most: float
) -> tuple[float, int]:
    """Return a dynamic scale and its count of backward passes without overflow, after one more pass.

    The scale is halved on overflow and doubled after ``window`` passes without. ``least`` None is a floor of
    2**-16: apex has none, and went on to 0.

    Example:
        >>> next_scale(8.0, 3, True, 2000, None, 2.0**24)
        (4.0, 0)
        >>> next_scale(8.0, 1999, False, 2000, None, 2.0**24)
        (16.0, 0)
    """
    if overflow:
        return max(least or min(MIN_SCALE, scale), scale / SCALE_FACTOR), 0
    if unskipped + 1 >= window:
        return min(most, scale * SCALE_FACTOR), 0
    return scale, unskipped + 1


class LossScaler:
    """One loss's scale: static, or moved by overflow.

    Args:
        loss_scale: "dynamic", or the scale: dimensionless, usually a power of two.
        init_scale: Where a dynamic scale starts, if ``max_loss_scale`` allows.
        scale_factor: Ignored, as in apex: 2.
        scale_window: Backward passes without overflow after which a dynamic scale is doubled.
        min_loss_scale: A dynamic scale isn't halved below it; it doesn't raise the start.
        max_loss_scale: A dynamic scale isn't doubled above it.

    Example:
        >>> scaler = LossScaler("dynamic", max_loss_scale=8.0, min_loss_scale=64.0)
        >>> scaler.loss_scale()
        8.0
    """

    warned_unscaling_non_fp32_grad = False
    """Whether it was said, once a process, that gradients aren't float32."""

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        self._loss_scale = min(max_loss_scale, init_scale) if self.dynamic else float(loss_scale)
        self._max_loss_scale, self._min_loss_scale = max_loss_scale, min_loss_scale
        self._scale_seq_len = scale_window
        self._unskipped = 0
        self._has_overflow = False
        self._found: list[Tensor] = []
        self._overflow_buf: Tensor | None = None
        """A flag that scripts put here, which counts as an overflow that was found."""
        self._warned_floor = False
        self.skips = 0
        """Steps that were skipped because of this scale."""

    def loss_scale(self) -> float:
        """Return the scale that losses are multiplied by now."""
        return self._loss_scale

    def clear_overflow_state(self) -> None:
        """Forget the overflow of earlier backward passes."""
        self._has_overflow, self._found = False, []
        if self._overflow_buf is not None:
            self._overflow_buf.zero_()

    def unscale_(self, grads: Sequence[Tensor], scale: float | None = None, *, check: bool = True) -> None:
        """Divide gradients by the scale, in place; remember on their device whether one was inf or NaN."""
        scale = self._loss_scale if scale is None else scale
        for bucket in sort_gradients(list(grads)):
            self._tell_of(bucket.dtype)
            found = torch.zeros((), dtype=torch.float32, device=bucket.device)
            unscale_bucket_(bucket, found, torch.full((), 1.0 / scale, dtype=torch.float32, device=bucket.device))
            if check:
                self._found.append(found)

    @staticmethod
    def _tell_of(dtype: torch.dtype) -> None:
        if dtype in LOW and not LossScaler.warned_unscaling_non_fp32_grad:
            LossScaler.warned_unscaling_non_fp32_grad = True
            say(
                f"Warning: unscaling gradients of {dtype}, where float32 is usual. Below O3 that may be an error: "
                "amp.initialize casts the model by itself, so don't call .half() on it."
            )

    def unscale(
        self,
        model_grads: Iterable[Tensor],
        master_grads: Iterable[Tensor],
        unused_scale: Any = None,
        models_are_masters: bool = False,
        scale_override: float | None = None,
    ) -> None:
        """Write ``model_grads`` divided by the scale into ``master_grads``; the form in which others call it."""
        masters = list(master_grads)
        _copy(masters, list(model_grads))
        self.unscale_(masters, scale_override, check=self.dynamic)

    def unscale_with_stashed(
        self,
        model_grads: Iterable[Tensor],
        stashed_master_grads: Iterable[Tensor],
        master_grads: Iterable[Tensor],
        scale_override: tuple[float, float, float] | None = None,
    ) -> None:
        """Write ``model_grads`` divided by the scale, plus the stashed gradients, into ``master_grads``."""
        stashed = [grad.clone() for grad in stashed_master_grads]
        masters = list(master_grads)
        self.unscale(model_grads, masters, scale_override=None if scale_override is None else scale_override[0])
        for master, old in zip(masters, stashed, strict=True):
            master.add_(old)

    def update_scale(self) -> bool:
        """Move the scale by what the gradients of this backward pass were; tell whether to skip the step.

        Waits for the device, once for each device that gradients are on, if the scale is dynamic.
        """
        flags = self._found if self._overflow_buf is None else [*self._found, self._overflow_buf]
        self._has_overflow = any(bool(flag) for flag in flags) if self.dynamic else False
        self._found = []
        if not self.dynamic:
            self._unskipped += 1
            return False
        before = self._loss_scale
        self._loss_scale, self._unskipped = next_scale(
            before,
            self._unskipped,
            self._has_overflow,
            self._scale_seq_len,
            self._min_loss_scale,
            self._max_loss_scale,
        )
        if self._has_overflow and before <= MIN_SCALE:
            self._warn_of_floor()
        return self._has_overflow

    def _warn_of_floor(self) -> None:
        if not self._warned_floor:
            self._warned_floor = True
            warnings.warn(
                f"gradients still overflow at a loss scale of {self._loss_scale:g}, its floor: every step is skipped. "
                "A scale can't mend that; look for inf or NaN in the loss, the inputs or the weights.",
                MpampWarning,
                stacklevel=4,
            )


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        if target is not source:
            target.copy_(source)
