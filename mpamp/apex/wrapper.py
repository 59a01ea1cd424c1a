"""apex's first interface: an optimizer with a loss scale for each of its losses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from .errors import AmpAssertionError, AmpNotImplementedError
from .scaler import LossScaler
from .state import say

__all__ = ["OptimWrapper", "unscale_in_place"]


def unscale_in_place(optimizer: Any, scaler: LossScaler) -> bool:
    """Divide an optimizer's gradients by the scale and move that; tell whether they overflowed."""
    grads = {id(p.grad): p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    scaler.clear_overflow_state()
    scaler.unscale_(list(grads.values()))
    return scaler.update_scale()


class OptimWrapper(Optimizer):
    """An optimizer that scales its losses: what ``handle.wrap_optimizer`` returns.

    Everything else is the wrapped optimizer's own.
    """

    def __init__(self, optimizer: Any, amp_handle: Any, num_loss: int) -> None:
        self._optimizer, self._amp_handle = optimizer, amp_handle
        self._num_loss, self._loss_idx = num_loss, 0
        self._skip_next = [False] * num_loss
        self._loss_scaler = [LossScaler("dynamic") for _ in range(num_loss)]
        wrappers = getattr(amp_handle, "_all_wrappers", None)
        if wrappers is not None:
            wrappers.append(self)

    @contextlib.contextmanager
    def scale_loss(self, loss: Any) -> Iterator[Any]:
        """Give the loss multiplied by its scale; on leaving, unscale its gradients and add those of the losses before.

        Raises:
            AmpAssertionError: There were more losses since the last step than ``num_loss``.
        """
        if not self._is_active():
            yield loss
            return
        if self._loss_idx >= self._num_loss:
            raise AmpAssertionError(
                f"over num_loss={self._num_loss} losses since the last step: say how many there are, "
                "handle.wrap_optimizer(optimizer, num_loss=...)."
            )
        kept = self._put_aside() if self._loss_idx > 0 else {}
        scaler = self._loss_scaler[self._loss_idx]
        try:
            yield loss * scaler.loss_scale()
            self._skip_next[self._loss_idx] = unscale_in_place(self._optimizer, scaler)
            self._loss_idx += 1
        except BaseException:
            for p in self._params():
                p.grad = None
            raise
        finally:
            for p, grad in kept.values():
                p.grad = grad if p.grad is None else p.grad + grad

    def _is_active(self) -> bool:
        return self._amp_handle is not None and bool(self._amp_handle.is_active())

    def _params(self) -> list[torch.Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _put_aside(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        kept = {id(p): (p, p.grad.detach().clone()) for p in self._params() if p.grad is not None}
        self._optimizer.zero_grad()
        return kept

    def step(self, closure: Any = None) -> Any:
        """Step the wrapped optimizer, unless a loss since the last step overflowed.

        Raises:
            AmpNotImplementedError: A closure was given.
        """
        if not self._is_active():
            return self._optimizer.step(*(() if closure is None else (closure,)))
        self._loss_idx = 0
        for p in self._params():
            self._amp_handle.remove_cache(p)
        if closure is not None:
            raise AmpNotImplementedError("a wrapped optimizer takes no closure: call scale_loss and then step().")
        if any(self._skip_next):
            say("Gradient overflow, skipping update")
            self._skip_next = [False] * self._num_loss
            return None
        return self._optimizer.step()

    # -- The wrapped optimizer's -----------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __getstate__(self) -> Any:
        return {name: value for name, value in vars(self).items() if name != "_amp_handle"}

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state, _amp_handle=None)  # a handle belongs to its process

    def __repr__(self) -> str:
        return repr(self._optimizer)

    def state_dict(self) -> Any:
        """Return the wrapped optimizer's."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the wrapped optimizer's."""
        self._optimizer.load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the wrapped optimizer's gradients, by its own arguments."""
        self._optimizer.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add to the wrapped optimizer's groups."""
        self._optimizer.add_param_group(param_group)
