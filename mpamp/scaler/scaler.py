"""The gradient scaler: torch's, for any device, that says when it skips and cannot die quietly."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from ..engine.compiling import left_to_python
from ..torch_internals import refresh_per_optimizer_state
from . import kernels
from .config import PluginMadeMeta, ScalerConfig
from .history import StepResult
from .state import check_scale
from .stepping import SteppingPart
from .watch import report_skips

__all__ = ["GradScaler"]

Optimizer = torch.optim.Optimizer


class GradScaler(SteppingPart, metaclass=PluginMadeMeta):
    """Scale losses so that gradients fit in float16, unscale the gradients, skip steps where that failed.

    An instance of ``torch.amp.GradScaler`` with the same methods and ``state_dict``; docs/scaler.md lists each
    difference.

    Args:
        device: Device type, as a string or a torch.device. None is the current accelerator, else the processor.
        init_scale: The first loss scale; dimensionless.
        growth_factor: What the scale is multiplied by after ``growth_interval`` updates without inf or NaN.
        backoff_factor: What it is multiplied by after an update with one.
        growth_interval: Counts updates.
        enabled: Whether anything is done at all; if not, ``step`` calls the optimizer and the rest does nothing.
        min_scale: The scale never falls below it. None: 2**-16, or ``init_scale`` if that is less.
        max_scale: The scale never grows above it. None: 2**126, or ``init_scale`` if that is more.
        max_consecutive_skips: Warn, naming the parameters, after so many updates in a row with an inf or NaN. None:
            never. Where the host doesn't know at once (fused optimizers on accelerators) it comes some updates later.
        error_on_max_skips: Raise instead of warning.
        allow_fp16_grads: Unscale float16 gradients, of a model that is float16 itself, too.
        process_group: The ranks that hold parts of one gradient, as under FSDP1: if one finds an inf or NaN, all skip.
            DDP and FSDP2 need none. ``torch.distributed.group.WORLD`` is None before ``init_process_group``.
        history_size: How many updates ``history`` remembers.

    Raises:
        ScalerSettingError: An argument that can't be (a ValueError); the message names it.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = GradScaler("cpu", init_scale=1024.0)
        >>> scaler.scale(model(torch.ones(4, 2)).sum() * float("inf")).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.last_step_skipped(optimizer), scaler.get_scale()
        (True, 512.0)
    """

    _asks_plugins = True

    def __init__(
        self,
        device: str | torch.device | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
        max_consecutive_skips: int | None = 100,
        error_on_max_skips: bool = False,
        allow_fp16_grads: bool = False,
        process_group: Any = None,
        history_size: int = 1024,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self._set_up(ScalerConfig(**arguments))

    @left_to_python
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End the iteration: move the scale by what the optimizers' gradients were like, or to ``new_scale``.

        Does not wait for the device.

        Args:
            new_scale: A scale to go on with; a number or a tensor with one element, which is copied. A tensor's value
                is not looked at: it is moved into ``[min_scale, max_scale]``, and NaN leaves the scale as it is.

        Raises:
            AssertionError: No optimizer's gradients were checked since the last update.
            ScalerSettingError: ``new_scale`` is a number that is no scale, or out of bounds.
            GradientOverflowError: After ``max_consecutive_skips``, if ``error_on_max_skips``; the scale has moved.
        """
        if not self._enabled:
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        states = [s["found_inf_per_device"] for s in self._per_optimizer_states.values() if s["found_inf_per_device"]]
        given = None if new_scale is None else self._checked_scale(scale, new_scale)
        found_inf = kernels.combine([f for state in states for f in state.values()], scale.device) if states else None
        if given is None and found_inf is None:
            raise AssertionError("No inf checks were recorded prior to update.")
        is_due = found_inf is not None and self._outcomes.count(scale, found_inf, len(states))
        if given is not None:
            scale.copy_(given).clamp_(self._min_scale, self._max_scale)
        elif found_inf is not None:
            kernels.update_scale_(scale, tracker, found_inf, self._rule())
        optimizers = self._ledger.optimizers()
        self._per_optimizer_states = defaultdict(refresh_per_optimizer_state)
        self._ledger.begin(self._per_optimizer_states)
        if is_due:
            report_skips(optimizers, self._outcomes.watch.streak, as_error=self._error_on_max_skips)

    def _checked_scale(self, scale: Tensor, new_scale: Any) -> Tensor:
        if not isinstance(new_scale, Tensor):
            assert self._min_scale is not None
            assert self._max_scale is not None
            number = check_scale("new_scale", new_scale, least=self._min_scale, most=self._max_scale)
            return torch.full_like(scale, number)
        if new_scale.device.type != self._device or new_scale.numel() != 1 or new_scale.requires_grad:
            raise AssertionError(
                "new_scale should be a float or a 1-element torch.cuda.FloatTensor or torch.FloatTensor with "
                f"requires_grad=False. It should be on {self._device!r}."
            )
        given = new_scale.reshape(()).to(scale)
        return torch.where(torch.isnan(given), scale, given)

    def _rule(self) -> kernels.Rule:
        bounds = (self._min_scale, self._max_scale)
        return kernels.Rule(self._growth_factor, self._backoff_factor, self._growth_interval, *bounds)

    def last_step(self, optimizer: Optimizer) -> StepResult | None:
        """Return the result of the optimizer's last step, or None before the first or if scaling is disabled.

        Its values stay on the device until one of them is asked for.
        """
        return self._outcomes.last(optimizer)

    def last_step_skipped(self, optimizer: Optimizer) -> bool:
        """Tell whether the optimizer's last step was skipped. Waits for the device if the optimizer is fused.

        False before the first step, and if scaling is disabled.
        """
        result = self._outcomes.last(optimizer)
        return result is not None and result.skipped

    def step_scheduler(self, scheduler: Any, optimizer: Optimizer | None = None, *args: Any, **kwargs: Any) -> bool:
        """Advance a learning rate scheduler, unless its optimizer's last step was skipped; tell whether it did.

        Args:
            scheduler: Any object with a ``step``.
            optimizer: Whose steps count. None: the scheduler's own.
            args: Passed on to the scheduler's ``step``.
            kwargs: Passed on to the scheduler's ``step``.
        """
        if self.last_step_skipped(scheduler.optimizer if optimizer is None else optimizer):
            return False
        scheduler.step(*args, **kwargs)
        return True
