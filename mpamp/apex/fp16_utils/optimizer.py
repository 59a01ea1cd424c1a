"""``FP16_Optimizer``: an optimizer with float32 masters and a loss scale of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...torch_internals import foreach_mul_
from ..errors import AmpTypeError, AmpUsageError
from ..holding import refuse_incomplete, swap
from ..masters import LOW
from .fp16util import master_params_to_model_params, model_grads_to_master_grads
from .loss_scaler import DynamicLossScaler, LossScaler

__all__ = ["FP16_Optimizer"]


class FP16_Optimizer:
    """Steps float32 masters of an optimizer's lower-precision parameters, and scales its losses.

    Args:
        init_optimizer: Any optimizer; masters take its lower-precision parameters' places, in order.
        static_loss_scale: The loss scale.
        dynamic_loss_scale: Move the scale by overflow; ``static_loss_scale`` is ignored then.
        dynamic_loss_args: Arguments of ``DynamicLossScaler``.
        verbose: Print the parameters and the overflows.

    Raises:
        AmpTypeError: A parameter is neither lower precision nor float32.

    Example:
        >>> model = nn.Linear(2, 1).half()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = FP16_Optimizer(optimizer, static_loss_scale=128.0, verbose=False)
        >>> optimizer.backward(model(torch.ones(1, 2).half()).float().sum())
        >>> optimizer.step()
        >>> optimizer.param_groups[0]["params"][0].dtype, model.weight.dtype
        (torch.float32, torch.float16)
    """

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        refuse_incomplete(init_optimizer)
        self.optimizer, self.verbose = init_optimizer, verbose
        self.fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp32_groups: list[list[Tensor]] = []
        for number, group in enumerate(init_optimizer.param_groups):
            self.maybe_print(f"FP16_Optimizer processing param group {number}:")
            self._process(group["params"])
        self.dynamic_loss_scale = dynamic_loss_scale
        self.loss_scaler = (
            DynamicLossScaler(**(dynamic_loss_args or {})) if dynamic_loss_scale else LossScaler(static_loss_scale)
        )
        self.overflow = False
        self.first_closure_call_this_step = True
        self._is_unscaled = False
        """Whether the gradients of float32 parameters, which are their own masters, are unscaled."""
        self.clip_grad_norm = nn.utils.clip_grad_norm_

    def _process(self, params: list[Tensor]) -> None:
        trained = [p for p in params if p.requires_grad]
        for p in trained:
            if p.dtype not in LOW and p.dtype is not torch.float32:
                raise AmpTypeError(
                    f"FP16_Optimizer takes float16, bfloat16 and float32 parameters, got {p.dtype} on {p.device}."
                )
            self.maybe_print(f"FP16_Optimizer received {p.type()} with {p.size()}")
        low = [p for p in trained if p.dtype in LOW]
        masters = [p.detach().clone().float().requires_grad_(True) for p in low]
        for p, master in zip(low, masters, strict=True):
            master.grad = None if p.grad is None else p.grad.detach().float()
        self.fp16_groups.append(low)
        self.fp32_from_fp16_groups.append(masters)
        self.fp32_from_fp32_groups.append([p for p in trained if p.dtype is torch.float32])
        swap(self.optimizer, {id(p): master for p, master in zip(low, masters, strict=True)})

    def maybe_print(self, text: str) -> None:
        """Print, if ``verbose``."""
        if self.verbose:
            print(text)

    def __getstate__(self) -> Any:
        raise AmpUsageError("an FP16_Optimizer can't be pickled: save its state_dict().")

    def __setstate__(self, state: Any) -> None:
        raise AmpUsageError("an FP16_Optimizer can't be unpickled: use load_state_dict().")

    # -- Gradients -----------------------------------------------------------------------------------

    def _pairs(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        return zip(self.fp16_groups, self.fp32_from_fp16_groups, strict=True)

    def _masters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Clear the gradients of parameters and masters.

        Args:
            set_grads_to_None: Set them to None; else to zero, the masters' to None.
        """
        for p in [p for group in [*self.fp16_groups, *self.fp32_from_fp32_groups] for p in group]:
            if p.grad is not None:
                p.grad = None if set_grads_to_None else p.grad.detach().zero_()
        for _, masters in self._pairs():
            for master in masters:
                master.grad = None

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Run a backward pass from the scaled loss, in place of ``loss.backward()``.

        Args:
            loss: The loss: a scalar, best in float32.
            update_master_grads: Unscale into the masters at once; False with several losses but the last, after
                which ``update_master_grads()`` is called by itself.
            retain_graph: Keep the graph.
        """
        if self._is_unscaled:  # the new gradients, which are scaled, are added to those
            self._multiply_own(self.loss_scaler.loss_scale)
        self.loss_scaler.backward(loss.float(), retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    @torch.no_grad()
    def update_master_grads(self) -> None:
        """Look for overflow, and bring the model's gradients into the masters, unscaled."""
        if self.dynamic_loss_scale:
            own = [p for group in [*self.fp16_groups, *self.fp32_from_fp32_groups] for p in group]
            self.overflow = self.loss_scaler.has_overflow(own)
            if self.overflow:
                return
        scale = self.loss_scaler.loss_scale
        for params, masters in self._pairs():
            model_grads_to_master_grads(params, masters)
            _multiply(masters, 1.0 / scale)
        if not self._is_unscaled:
            self._multiply_own(1.0 / scale)

    def _multiply_own(self, factor: float) -> None:
        for params in self.fp32_from_fp32_groups:
            _multiply(params, factor)
        self._is_unscaled = not self._is_unscaled

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the masters' gradients; return their norm, or -1 after an overflow."""
        return -1 if self.overflow else self.clip_grad_norm(self._masters(), max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Return the masters' gradients by group, or None after an overflow."""
        if self.overflow:
            print("Warning:  calling FP16_Optimizer.inspect_master_grad_data while in an overflow state.")
            return None
        groups = self.optimizer.param_groups
        return [[None if p.grad is None else p.grad.detach() for p in group["params"]] for group in groups]

    # -- Steps ---------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters and copy them into the model; do nothing but move the scale after an overflow.

        Args:
            closure: Calls ``backward`` of this optimizer, and returns the loss; for a static scale.

        Raises:
            AmpUsageError: A closure with a dynamic scale.
        """
        scale = self.loss_scaler.loss_scale
        if closure is not None and self.dynamic_loss_scale:
            raise AmpUsageError("FP16_Optimizer takes a closure with a static loss scale only.")
        self.loss_scaler.update_scale(self.overflow)
        if self.overflow:
            self.maybe_print(
                f"OVERFLOW! Skipping step. Attempted loss scale: {scale}, reducing to {self.loss_scaler.loss_scale}"
            )
            return None
        result = self.optimizer.step() if closure is None else self._step_with_closure(closure)
        self._write_back()
        return result

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        def wrapped() -> Any:
            if self.first_closure_call_this_step:
                self.first_closure_call_this_step = False  # the model has the masters' values already
            else:
                self._write_back()
            return closure()

        result = self.optimizer.step(wrapped)
        self.first_closure_call_this_step = True
        return result

    def _write_back(self) -> None:
        for params, masters in self._pairs():
            master_params_to_model_params(params, masters)

    # -- State ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, the masters and the scaler."""
        return {
            "loss_scaler": self.loss_scaler,
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": self.fp32_from_fp16_groups,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave, masters included; load the model as well."""
        self.loss_scaler = state_dict["loss_scaler"]
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.overflow = state_dict["overflow"]
        self.first_closure_call_this_step = state_dict["first_closure_call_this_step"]
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        for masters, saved in zip(self.fp32_from_fp16_groups, state_dict["fp32_from_fp16"], strict=True):
            for master, value in zip(masters, saved, strict=True):
                master.copy_(value)

    @property
    def loss_scale(self) -> float:
        """The loss scale; may be set."""
        return self.loss_scaler.cur_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.cur_scale = value

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> Any:
        """The wrapped optimizer's groups, with masters."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.optimizer.param_groups = value


@torch.no_grad()
def _multiply(params: list[Tensor], factor: float) -> None:
    grads = [p.grad for p in params if p.grad is not None]
    if factor != 1.0 and grads:
        foreach_mul_(grads, factor)
