"""What an optimizer holds for amp where it steps float32 masters of lower-precision parameters."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ..errors import MpampWarning
from .errors import AmpTypeError, AmpUsageError, AmpValueError
from .holding import swap
from .masters import LOW, Master, adopt, forget, is_ahead, is_same, keep, master_of, write_back
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

    def __init__(self, optimizer: Any, exact: dict[Tensor, Tensor]) -> None:
        super().__init__(optimizer)
        self.models: dict[int, tuple[Tensor, Master]] = {}
        """By the id of the master: the parameter that it stands for."""
        self.is_first = True
        self.has_scaled = False
        """Whether a scaled loss has ever brought gradients."""
        self.is_proven = False
        """Whether a step was seen to leave the model's own parameters alone."""
        self.refresh(exact)
        for p in self.own():
            p.grad = None
        for model, _ in self.pairs:
            model.grad = None

    def refresh(self, exact: dict[Tensor, Tensor] | None = None) -> None:
        """Put masters in place of lower-precision parameters that are new in the groups, or no longer frozen."""
        owned = {id(model) for model, _ in self.models.values()}
        new: dict[int, tuple[Tensor, Master]] = {}
        for p in self.params():
            if not p.requires_grad or p.dtype is torch.float32:
                continue
            refuse_dtype(p)
            if id(p) in owned:
                raise AmpValueError("some parameters appear in more than one parameter group")
            new[id(p)] = (p, master_of(p) or Master(p, None if exact is None else exact.get(p)))
        if not new:
            return
        swap(self.optimizer, {key: master.weight for key, (_, master) in new.items()})
        for p, master in new.values():
            keep(p, master)
            master.owners += 1
            self.models[id(master.weight)] = (p, master)
        left = [p for p in self.params() if id(p) in new]
        if left:
            raise AmpUsageError(
                f"the param_groups of this {type(self.optimizer).__name__} can't be changed: they hold the model's "
                f"parameters still, where amp needs to put float32 masters of {len(left)} of them."
            )

    @property
    def pairs(self) -> list[tuple[Tensor, Master]]:
        """Every parameter that has a master, and that."""
        return list(self.models.values())

    def own(self) -> list[Tensor]:
        return [p for p in self.params() if id(p) not in self.models and p.dtype is torch.float32]

    def scaled(self) -> list[Tensor]:
        return [*self.own(), *(model for model, _ in self.pairs)]

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
        for model, master in self.pairs:
            model.grad = None
            if master.is_stepped:
                master.weight.grad, master.is_stepped = None, False
        super().prepare()

    def finish(self, scaler: LossScaler, seen: set[int], *, check: bool) -> None:
        self.has_scaled = True
        self.refresh()
        fresh = {}
        for model, master in self.pairs:
            if model.grad is not None and id(master.weight) not in seen:
                fresh[id(master.weight)] = (master.weight, _float32_copy(model.grad))
        scaler.unscale_([grad for _, grad in fresh.values()], check=check)
        seen.update(fresh)
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
        self.is_first = self.params_have_scaled_gradients = False
        for p in [*self.all_fp16_params, *self.own()]:
            if p.grad is not None:
                if set_to_none:
                    p.grad = None
                else:
                    p.grad = p.grad.detach().zero_()
        for _, master in self.pairs:
            master.weight.grad = None
        self.catch_up()

    def catch_up(self) -> None:
        """Carry over to the model what others than the optimizer's step have written into the masters."""
        if any(is_ahead(master) for _, master in self.models.values()):
            self.settle()

    def settle(self) -> None:
        self._adopt()
        self.write_back()

    def _adopt(self) -> None:
        for model, master in self.pairs:
            adopt(model, master)

    def before_step(self) -> None:
        self.refresh()
        self._adopt()
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
        for _, master in self.pairs:
            if master.owners > 1:
                master.is_stepped = True  # the others step the same gradient
            else:
                master.weight.grad = None
        if skipped:
            return
        if not self.is_proven:
            self._refuse_a_step_of_the_model()
            self.is_proven = True
        self.write_back()

    @torch.no_grad()
    def _refuse_a_step_of_the_model(self) -> None:
        """Refuse an optimizer that has stepped the model's own parameters, whose gradients are still scaled."""
        moved = [(model, master) for model, master in self.pairs if not is_same(model, master)]
        for model, master in moved:
            model.copy_(master.low)
        if moved:
            raise AmpUsageError(
                f"the step of this {type(self.optimizer).__name__} wrote into the model's own parameters rather than "
                f"into those of its param_groups, where amp has put float32 masters ({len(moved)} of "
                f"{len(self.models)}; they are as before). Have it read its parameters from param_groups, or use O1 or "
                "O4, which need no masters."
            )

    def write_back(self) -> None:
        """Copy the masters into the model."""
        write_back(self.pairs)

    def release(self) -> None:
        swap(self.optimizer, {id(master.weight): model for model, master in self.pairs})
        for model, master in self.pairs:
            grad, model.grad = master.weight.grad, None
            if master_of(model) is master:
                adopt(model, master)
                model.data = master.weight.data
                forget(model)
            model.grad = grad
        self.models.clear()


def _float32_copy(grad: Tensor) -> Tensor:
    return grad.detach().clone() if grad.dtype is torch.float32 else grad.detach().float()


def make_stash(optimizer: Any, exact: dict[Tensor, Tensor] | None) -> Stash:
    """Return the stash of an optimizer; with masters if ``exact`` tells the values that they start from."""
    return Stash(optimizer) if exact is None else MasterStash(optimizer, exact)
