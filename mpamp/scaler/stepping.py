"""The part of the scaler that steps optimizers, or skips their steps."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ..engine.compiling import left_to_python
from . import kernels
from .closures import Closure, Evaluations, SkipStep, is_torchs, replace_closure, take_closure
from .fused import is_fused, lent
from .gradients import gradients_of, has_graph
from .history import StepResult
from .unscaling import UnscalingPart

__all__ = ["SteppingPart"]

Optimizer = torch.optim.Optimizer


class SteppingPart(UnscalingPart):
    """Unscaled gradients in, a step or none out, and what became of it remembered."""

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
            self._remember(optimizer, self._found_inf(state))
        return returned

    def _maybe_opt_step(self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if not self._remember(optimizer, self._found_inf(optimizer_state)).skipped:
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
        self._remember(optimizer, self._found_inf(state))
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
        found_inf = self._found_inf(state)
        if not (is_ready and self._finds_by_itself()):
            found_inf = kernels.as_flag(found_inf)
        self._remember(optimizer, found_inf)
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
            self._remember(optimizer, self._found_inf(state))
        return returned

    def _remember(self, optimizer: Optimizer, found_inf: Tensor) -> StepResult:
        scale, _ = self._check_scale_growth_tracker("step")
        return self._outcomes.remember(optimizer, found_inf, scale)

    def _found_inf(self, state: dict[str, Any]) -> Tensor:
        scale, _ = self._check_scale_growth_tracker("step")
        return kernels.combine(list(state["found_inf_per_device"].values()), scale.device)


def _set_called(optimizer: Any) -> None:
    """Keep learning rate schedulers from warning of a wrong order: they look whether their optimizer was called."""
    with contextlib.suppress(AttributeError):
        optimizer._opt_called = True
