"""One iteration of a scaler, where a framework steps optimizers one by one and knows of no iteration."""

from __future__ import annotations

from typing import Any

import torch

from ..scaler import GradScaler

__all__ = ["Iteration"]


class Iteration:
    """Unscales gradients once, and moves the scale once all optimizers with gradients of one scale have stepped.

    Frameworks call ``scaler.update()`` after each optimizer's step. Where the backward passes of two optimizers
    come before both steps, the second one's gradients would be unscaled by a scale that they weren't scaled with.

    Args:
        scaler: mpamp's, or any ``torch.amp.GradScaler``.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> first, second = (torch.optim.SGD([p], lr=0.1) for p in model.parameters())
        >>> iteration = Iteration(GradScaler("cpu", init_scale=4.0, growth_interval=1))
        >>> iteration.scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        >>> for optimizer in (first, second):
        ...     iteration.unscale_(optimizer)
        ...     iteration.step(optimizer, is_only=False)
        >>> model.bias.grad, iteration.scaler.get_scale()
        (tensor([1., 1.]), 4.0)
        >>> iteration.end()
        >>> iteration.scaler.get_scale()
        8.0
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler
        self._stepped: list[torch.optim.Optimizer] = []

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale an optimizer's gradients, unless they are."""
        if self._has_stepped(optimizer):
            self.end()
        if not (isinstance(self.scaler, GradScaler) and self.scaler.is_unscaled(optimizer)):
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, is_only: bool, **kwargs: Any) -> Any:
        """Step an optimizer by the scaler.

        Args:
            optimizer: Owns the gradients.
            args: Passed on to its ``step``.
            is_only: Whether it is the only one, so that its step ends the iteration.
            kwargs: Passed on to its ``step``.
        """
        if self._has_stepped(optimizer):
            self.end()
        returned = self.scaler.step(optimizer, *args, **kwargs)
        self._stepped.append(optimizer)
        if is_only:
            self.end()
        return returned

    def end(self) -> None:
        """Move the scale, if an optimizer has stepped since it last moved: before a loss is scaled, or state saved."""
        if self._stepped:
            self._stepped = []
            self.scaler.update()

    def _has_stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(optimizer is stepped for stepped in self._stepped)
