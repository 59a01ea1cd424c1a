"""What an optimizer holds for amp: its gradients put aside, its master weights, and whether its next step is skipped."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import MpampWarning
from .errors import AmpTypeError, AmpValueError
from .masters import LOW, Master, adopt, forget, write_back
from .scaler import LossScaler

__all__ = ["MasterStash", "Stash", "make_stash"]



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


Grads = dict[int, tuple[Tensor, Tensor]]
"""Parameters and gradients, by the parameter's id."""


class Stash:
    """What amp keeps about an optimizer whose parameters it steps as they are."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.lazy_init_called = True
        self.already_patched = False
        """Whether the next step is skipped."""
        self.params_have_scaled_gradients = False
        self.skip_message = ""
        self.skipped_by: tuple[LossScaler, int] | None = None
        self.put_aside: Grads | None = None
        self.hidden: Grads = {}

    # -- Which parameters ----------------------------------------------------------------------------

    def params(self) -> Iterator[Tensor]:
        """Yield what the optimizer steps."""
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def own(self) -> list[Tensor]:
        """Return the parameters that the optimizer steps as they are, and whose gradients are unscaled in place."""
        return list(self.params())

    @property
    def all_fp16_params(self) -> list[Tensor]:
        """The lower-precision parameters."""
        return [p for p in self.params() if p.dtype in LOW]

    @property
    def all_fp32_params(self) -> list[Tensor]:
        """The float32 parameters."""
        return [p for p in self.params() if p.dtype is torch.float32]

    # -- Around a backward pass ----------------------------------------------------------------------

    def prepare(self) -> None:
        """Put gradients that are there aside, so that the backward pass brings new ones only."""
        self.put_aside = {id(p): (p, p.grad) for p in self.own() if p.grad is not None}
        for p in self.own():
            p.grad = None

    def finish(self, scaler: LossScaler, seen: set[int], *, check: bool) -> None:
        """Unscale the new gradients, each once, and add to them those put aside."""
        fresh = {id(p): (p, p.grad) for p in self.own() if p.grad is not None and id(p) not in seen}
        seen.update(fresh)
        scaler.unscale_([grad for _, grad in fresh.values()], check=check)
        self.bring_back(fresh)
        self.params_have_scaled_gradients = False

    def bring_back(self, fresh: Grads) -> None:
        """Add the gradients put aside to the new ones; they stand alone where there are no new ones."""
        aside, self.put_aside = self.put_aside or {}, None
        for key, (p, old) in aside.items():
            if key in fresh:
                grad = fresh[key][1]
                wide = grad.float() + old.float() if grad.dtype in LOW else grad + old
                p.grad = wide.to(grad.dtype)
            elif p.grad is None:
                p.grad = old

    def abandon(self) -> None:
        """Give back the gradients put aside, in place of those of a backward pass that failed."""
        if self.put_aside is not None:
            for p in self.own():
                p.grad = None
            self.bring_back({})

    # -- Around a step -------------------------------------------------------------------------------

    def skip_next(self, scaler: LossScaler, loss_id: int) -> None:
        """Have the next step do nothing, once."""
        self.already_patched = True
        self.skipped_by = (scaler, loss_id)

    def hide(self) -> None:
        """Take every gradient away, so that a step finds nothing to do."""
        for p in self.params():
            if p.grad is not None:
                self.hidden[id(p)] = (p, p.grad)
                p.grad = None

    def before_step(self) -> None:
        """Make what is stepped ready."""

    def before_closure(self) -> None:
        """Make the model ready for a forward pass in the middle of a step."""

    def after_step(self, *, skipped: bool) -> None:
        """Carry a step's result over, or clean up after a skipped one."""
        hidden, self.hidden = self.hidden, {}
        for p, grad in hidden.values():
            p.grad = grad

    def release(self) -> None:
        """Give the optimizer back as it was."""


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
