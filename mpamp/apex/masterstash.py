"""What an optimizer holds for amp where it steps float32 masters of lower-precision parameters."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import MpampWarning
from .errors import AmpTypeError, AmpValueError
from .masters import LOW, Master, adopt, forget, write_back
from .scaler import LossScaler
from .stash import Stash

__all__ = ["MasterStash", "make_stash", "refuse_dtype"]


def refuse_dtype(p: Tensor) -> None:
    """Refuse a parameter that can neither be stepped as it is nor have a master.

    Raises:
        AmpTypeError: It has another dtype than float32, float16 and bfloat16.
    """
    if p.dtype not in LOW and p.dtype is not torch.float32:
        raise AmpTypeError(
            f"an optimizer with master weights has a {p.dtype} parameter on {p.device}; it may have float32, float16 "
            "and bfloat16 ones."
        )


class MasterStash(Stash):
    """What amp keeps about an optimizer that steps float32 masters in place of lower-precision parameters."""

    def __init__(self, optimizer: Optimizer, exact: dict[Tensor, Tensor]) -> None:
        super().__init__(optimizer)
        self.models: dict[int, tuple[Tensor, Master]] = {}
        """By the id of the master: the parameter that it stands for."""
        self.is_first = True
        self.has_scaled = False
        """Whether a scaled loss has ever brought gradients."""
        self.refresh(exact)
        for p in self.own():
            p.grad = None
        for model, _ in self.pairs:
            model.grad = None

    def refresh(self, exact: dict[Tensor, Tensor] | None = None) -> None:
        """Put masters in place of lower-precision parameters that are new in the groups, or no longer frozen."""
        owned = {id(model) for model, _ in self.models.values()}
        for group in self.optimizer.param_groups:
            for place, p in enumerate(group["params"]):
                if not p.requires_grad or p.dtype is torch.float32:
                    continue
                refuse_dtype(p)
                if id(p) in owned:
                    raise AmpValueError("some parameters appear in more than one parameter group")
                master = Master(p, None if exact is None else exact.get(p))
                group["params"][place] = master.weight
                self.models[id(master.weight)] = (p, master)
                if p in self.optimizer.state:
                    self.optimizer.state[master.weight] = self.optimizer.state.pop(p)

    @property
    def pairs(self) -> list[tuple[Tensor, Master]]:
        """Every parameter that has a master, and that."""
        return list(self.models.values())

    def own(self) -> list[Tensor]:
        return [p for p in self.params() if id(p) not in self.models and p.dtype is torch.float32]

    def _by_group(self, what: Any) -> list[list[Tensor]]:
        groups = self.optimizer.param_groups
        return [[found for p in group["params"] if (found := what(p)) is not None] for group in groups]

    @property
    def fp16_groups(self) -> list[list[Tensor]]:
        """By group: the parameters that have masters."""
        return self._by_group(lambda p: self.models[id(p)][0] if id(p) in self.models else None)

    @property
    def fp32_from_fp16_groups(self) -> list[list[Tensor]]:
        """By group: the masters."""
        return self._by_group(lambda p: p if id(p) in self.models else None)

    @property
    def fp32_from_fp32_groups(self) -> list[list[Tensor]]:
        """By group: the float32 parameters, which are their own masters."""
        return self._by_group(lambda p: p if id(p) not in self.models and p.dtype is torch.float32 else None)

    @property
    def all_fp16_params(self) -> list[Tensor]:
        return [p for group in self.fp16_groups for p in group]

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """The masters."""
        return [p for group in self.fp32_from_fp16_groups for p in group]

    @property
    def all_fp32_from_fp32_params(self) -> list[Tensor]:
        """The float32 parameters."""
        return [p for group in self.fp32_from_fp32_groups for p in group]

    def prepare(self) -> None:
        self.refresh()
        if self.is_first:  # gradients from before the first scaled loss don't count, as in apex
            self.is_first = False
            for p in self.own():
                p.grad = None
        for model, _ in self.pairs:
            model.grad = None
        super().prepare()

    def finish(self, scaler: LossScaler, seen: set[int], *, check: bool) -> None:
        self.has_scaled = True
        self.refresh()
        fresh = {}
        for model, master in self.pairs:
            if model.grad is not None:
                fresh[id(master.weight)] = (master.weight, _float32_copy(model.grad))
        scaler.unscale_([grad for _, grad in fresh.values()], check=check)
        for weight, grad in fresh.values():
            weight.grad = grad if weight.grad is None else grad + weight.grad
        super().finish(scaler, seen, check=check)

    def abandon(self) -> None:
        if self.put_aside is not None:
            for model, _ in self.pairs:
                model.grad = None
        super().abandon()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear the gradients of the model's parameters and of the masters.

        Args:
            set_to_none: Set them to None; else the parameters' become zero and only the masters' None.
        """
        self.is_first = False
        for p in [*self.all_fp16_params, *self.own()]:
            if p.grad is not None:
                if set_to_none:
                    p.grad = None
                else:
                    p.grad = p.grad.detach().zero_()
        self._clear_master_grads()

    def _clear_master_grads(self) -> None:
        for _, master in self.pairs:
            master.weight.grad = None

    def before_step(self) -> None:
        self.refresh()
        for model, master in self.pairs:
            adopt(model, master)
        if not self.has_scaled:
            self._warn_of_lost_grads()

    def _warn_of_lost_grads(self) -> None:
        if all(p.grad is None for p in self.params()) and any(m.grad is not None for m, _ in self.pairs):
            warnings.warn(
                "step() found gradients on the model and none on the master weights, so it changes nothing: call "
                "backward() on the loss that `with amp.scale_loss(loss, optimizer) as scaled_loss:` gives.",
                MpampWarning,
                stacklevel=5,
            )

    def before_closure(self) -> None:
        self.write_back()

    def after_step(self, *, skipped: bool) -> None:
        super().after_step(skipped=skipped)
        self._clear_master_grads()
        if not skipped:
            self.write_back()

    def write_back(self) -> None:
        """Copy the masters into the model."""
        write_back(self.pairs)

    def release(self) -> None:
        state = self.optimizer.state
        for group in self.optimizer.param_groups:
            for place, p in enumerate(group["params"]):
                if id(p) in self.models:
                    model, master = self.models[id(p)]
                    group["params"][place] = model
                    adopt(model, master)
                    if p in state:
                        state[model] = state.pop(p)
                    grad, model.grad = p.grad, None
                    model.data = master.weight.data
                    model.grad = grad
                    forget(model)
        self.models.clear()


def _float32_copy(grad: Tensor) -> Tensor:
    return grad.detach().clone() if grad.dtype is torch.float32 else grad.detach().float()


def make_stash(optimizer: Optimizer, exact: dict[Tensor, Tensor] | None) -> Stash:
    """Return the stash of an optimizer; with masters if ``exact`` tells the values that they start from."""
    return Stash(optimizer) if exact is None else MasterStash(optimizer, exact)
