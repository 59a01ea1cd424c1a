"""Which gradients were unscaled since the last update, so that one of two optimizers' is unscaled once."""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import Tensor

from ..errors import ScalerUsageError
from .gradients import all_gradients, name_gradients

__all__ = ["Ledger"]

_version_of = attrgetter("_version")


class _Entry:
    """One optimizer's gradients as its unscaling left them. Holds them, lest another tensor get their identity."""

    __slots__ = ("is_fused", "kept", "optimizer", "versions")

    def __init__(self, optimizer: torch.optim.Optimizer, grads: list[Tensor] | None, *, is_fused: bool) -> None:
        self.optimizer = optimizer
        self.is_fused = is_fused
        self.kept = grads
        self.versions = [] if grads is None else list(map(_version_of, grads))

    def by_identity(self) -> dict[int, int | None]:
        """Return each gradient's version after unscaling; None where that isn't known."""
        if self.kept is None:
            return {id(grad): None for grad in all_gradients(self.optimizer)}
        if self.is_fused:
            return {id(grad): None for grad in self.kept}
        return dict(zip(map(id, self.kept), self.versions, strict=True))


class Ledger:
    """What was unscaled since the last update.

    Gradients are held until then, which costs memory where each optimizer's would be freed before. So they are not
    held once there was an update with several optimizers of which none shared a parameter with another.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._last: tuple[int, list[Tensor]] = (0, [])
        """The gradients last looked at, and their optimizer's identity."""
        self._holds = True
        self._shares = False

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers whose gradients were looked at since the last update."""
        return [entry.optimizer for entry in self._entries.values()]

    def split(self, optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], list[Tensor]]:
        """Split an optimizer's gradients into (still scaled, unscaled with another optimizer).

        Raises:
            ScalerUsageError: It can't be known which of the two one is.
        """
        grads = all_gradients(optimizer)
        self._last = (id(optimizer), grads)
        others = [entry for key, entry in self._entries.items() if key != id(optimizer)]
        if not others:
            return grads, []
        seen: dict[int, int | None] = {}
        for entry in others:
            seen.update(entry.by_identity())
        done = [grad for grad in grads if id(grad) in seen]
        if not done:
            return grads, []
        self._shares = self._holds = True
        for grad in done:
            if seen[id(grad)] != grad._version:
                raise self._refusal(optimizer, grad, seen[id(grad)])
        return [grad for grad in grads if id(grad) not in seen], done

    def shares(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tell whether a gradient of the optimizer was unscaled with another since the last update."""
        return any(key != id(optimizer) for key in self._entries) and bool(self.split(optimizer)[1])

    def record(self, optimizer: torch.optim.Optimizer, *, is_fused: bool = False) -> None:
        """Note that an optimizer's gradients are unscaled now; or will be by its fused kernel, unless it skips."""
        number, grads = self._last
        if number != id(optimizer):  # a subclass has unscaled them by itself
            grads = all_gradients(optimizer)
        self._last = (0, [])
        self._entries.pop(id(optimizer), None)  # the latest comes last, and its versions count
        self._entries[id(optimizer)] = _Entry(optimizer, grads if self._holds else None, is_fused=is_fused)

    def clear(self) -> None:
        """Forget the entries: an update ends the iteration."""
        if len(self._entries) > 1:
            self._holds = self._shares
            self._shares = False
        self._entries.clear()
        self._last = (0, [])

    def _refusal(self, optimizer: torch.optim.Optimizer, grad: Tensor, version: int | None) -> ScalerUsageError:
        names = name_gradients(optimizer, lambda other: other is grad)
        what = "may have been unscaled" if version is None else "was unscaled, and changed since,"
        return ScalerUsageError(
            f"the gradient of {names} {what} with another optimizer that owns the parameter too. Whether to unscale it "
            "again can't be known. Call scaler.unscale_() with both optimizers before either steps and before "
            "gradients are clipped, or zero_grad(set_to_none=True) before the second backward pass."
        )
