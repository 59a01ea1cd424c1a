"""The gradient scaler: torch's, for any device, that says when it skips and cannot die quietly."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from ..compiling import left_to_python
from . import kernels
from .closures import Closure, Evaluations, SkipStep, is_torchs, replace_closure, take_closure
from .config import PluginMadeMeta, ScalerConfig
from .fused import is_fused, lent
from .gradients import gradients_of, has_graph
from .history import StepResult
from .state import check_scale
from .unscaling import UnscalingPart
from .watch import report_skips

__all__ = ["GradScaler"]

Optimizer = torch.optim.Optimizer


class GradScaler(UnscalingPart, metaclass=PluginMadeMeta):
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
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale the gradients, unless that was done, and step the optimizer, unless one has an inf or NaN.

        Waits for the device once; not at all if the optimizer is fused, for its kernel decides. Without any
        gradient, the optimizer steps. A closure, by keyword or as the first argument, is called once, before; it
        must scale its loss.

        Args:
            optimizer: Owns the gradients.
            args: Passed on to its ``step``.
            kwargs: Passed on to its ``step``.

        Returns:
            What the optimizer's ``step`` returns, else the closure's value; None if the step was skipped.
            ``last_step_skipped`` and ``last_step`` say which it was.

        Raises:
            RuntimeError: The optimizer has stepped since the last update.
            ScalerUsageError, Fp16GradientError: Its closure can't be served, its gradients can't be unscaled.
            AssertionError: Nothing was scaled yet.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        closure = take_closure(optimizer, args, kwargs)
        if closure is None:
            self._check_scale_growth_tracker("step")
        state = self._state_of(optimizer)
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        value, decides = None, is_fused(optimizer)
        if closure is not None:
            if not (decides or is_torchs(optimizer)):
                return self._step_evaluating(optimizer, state, closure, args, kwargs)
            with torch.enable_grad():
                value = closure()
            self._check_scale_growth_tracker("step")
            args, kwargs = replace_closure(args, kwargs, None)
        take_step = self._fused_step if decides else self._plain_step
        returned = take_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return value if returned is None else returned

    def _plain_step(self, optimizer: Optimizer, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if state["stage"] is OptState.READY or self._ledger.has_late(optimizer):
            self.unscale_(optimizer)
        if not state["found_inf_per_device"]:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        before = self._outcomes.last(optimizer)
        returned = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        if self._outcomes.last(optimizer) is before:  # a subclass has its own
            self._remember(optimizer, state)
        return returned

    def _maybe_opt_step(self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if not self._remember(optimizer, optimizer_state).skipped:
            return optimizer.step(*args, **kwargs)
        _set_called(optimizer)
        return None

    def _step_evaluating(
        self, optimizer: Optimizer, state: dict[str, Any], closure: Closure, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Step an optimizer that may call its closure more than once; a skip puts the weights back."""

        def has_inf() -> bool:
            if state["stage"] is OptState.READY or self._ledger.has_late(optimizer):
                self.unscale_(optimizer)
            return bool(self._found_inf(state) > 0)

        evaluations = Evaluations(optimizer, closure, has_inf)
        args, kwargs = replace_closure(args, kwargs, evaluations)
        returned = None
        try:
            # What a backward pass since the update left is for the optimizer to use, else it is an iteration old.
            if state["stage"] is OptState.UNSCALED or self._ledger.has_passed():
                evaluations.check()
            returned = optimizer.step(*args, **kwargs)
        except SkipStep:
            evaluations.put_back_weights()
            _set_called(optimizer)
        self._check_scale_growth_tracker("step")
        if state["stage"] is OptState.READY:  # it has not called its closure
            self.unscale_(optimizer)
        self._remember(optimizer, state)
        state["stage"] = OptState.STEPPED
        return evaluations.value if returned is None else returned

    def _fused_step(self, optimizer: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if "grad_scaler" in inspect.signature(optimizer.step).parameters:
            return self._step_with_scaler(optimizer, state, *args, **kwargs)
        if self._needs_unscaling(optimizer, state):
            self.unscale_(optimizer)
        is_ready = state["stage"] is OptState.READY
        if is_ready:
            self._check_inf_per_device(optimizer)
        scale = self._get_scale_async()
        given = getattr(optimizer, "grad_scale", None)
        grad_scale = given if not is_ready else scale if given is None else scale * given
        self._remember(optimizer, state)
        found_inf = self._found_inf(state)
        with lent(optimizer, grad_scale, found_inf):
            returned = optimizer.step(*args, **kwargs)
        if is_ready:
            self._ledger.record_fused(optimizer, state, found_inf, is_known=is_torchs(optimizer))
        return returned

    def _needs_unscaling(self, optimizer: Optimizer, state: dict[str, Any]) -> bool:
        """Tell whether there are gradients that a fused kernel would unscale again, or not, or out of their graph."""
        if state["stage"] is OptState.UNSCALED:
            return self._ledger.has_late(optimizer)
        return self._ledger.shares(optimizer) or has_graph(gradients_of(optimizer))

    def _step_with_scaler(self, optimizer: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        warnings.warn(
            "GradScaler is going to stop passing itself as a keyword argument to the passed optimizer. In the near "
            "future GradScaler registers `grad_scale: Tensor` and `found_inf: Tensor` to the passed optimizer and "
            "let the optimizer use them directly.",
            FutureWarning,
            stacklevel=4,
        )
        returned = optimizer.step(*args, **kwargs, grad_scaler=self)
        if state["found_inf_per_device"]:
            self._remember(optimizer, state)
        return returned

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
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
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

    def _remember(self, optimizer: Optimizer, state: dict[str, Any]) -> StepResult:
        scale, _ = self._check_scale_growth_tracker("step")
        return self._outcomes.remember(optimizer, self._found_inf(state), scale)

    def _found_inf(self, state: dict[str, Any]) -> Tensor:
        scale, _ = self._check_scale_growth_tracker("step")
        return kernels.combine(list(state["found_inf_per_device"].values()), scale.device)

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


def _set_called(optimizer: Any) -> None:
    """Keep learning rate schedulers from warning of a wrong order: they look whether their optimizer was called."""
    with contextlib.suppress(AttributeError):
        optimizer._opt_called = True
