"""What an optimizer holds for amp: its gradients put aside, and whether its next step is skipped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .errors import AmpUsageError
from .masters import LOW
from .scaler import LossScaler

__all__ = ["Stash"]

Grads = dict[int, tuple[Tensor, Tensor]]
"""Parameters and gradients, by the parameter's id."""


class Stash:
    """What amp keeps about an optimizer whose parameters it steps as they are."""

    def __init__(self, optimizer: Any) -> None:
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

    def catch_up(self) -> None:
        """Make the model ready for a forward pass."""

    def settle(self) -> None:
        """Make the model ready for a forward pass, whichever way masters were written."""

    def before_step(self) -> None:
        """Make what is stepped ready."""

    def refuse_scaled(self) -> None:
        """Refuse a step on gradients that are scaled still.

        Raises:
            AmpUsageError: In a ``scale_loss`` block, or after blocks with ``delay_unscale`` alone.
        """
        where = ""
        if self.put_aside is not None:
            where = "inside of amp.scale_loss, whose end unscales gradients: call it after the block"
        elif self.params_have_scaled_gradients and any(p.grad is not None for p in self.scaled()):
            where = "after amp.scale_loss(..., delay_unscale=True) alone: leave it out in the last block before step()"
        if where:
            raise AmpUsageError(f"this {type(self.optimizer).__name__}'s step() was called {where}.")

    def scaled(self) -> list[Tensor]:
        """Return the parameters that a backward pass gives scaled gradients."""
        return list(self.params())

    def before_closure(self) -> None:
        """Make the model ready for a forward pass in the middle of a step."""

    def unhide(self) -> bool:
        """Put back what ``hide`` took; tell whether it took anything."""
        hidden, self.hidden = self.hidden, {}
        for p, grad in hidden.values():
            p.grad = grad
        return bool(hidden)

    def after_step(self, *, skipped: bool) -> None:
        """Carry a step's result over, or clean up after a skipped one."""

    def refresh(self) -> None:
        """Take notice of parameters that are new in the groups."""

    def release(self) -> None:
        """Give the optimizer back as it was."""
