"""``LARC``: a learning rate for each parameter, by the norms of its values and gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...torch_internals import foreach_add_, foreach_mul, foreach_mul_, foreach_norm

__all__ = ["LARC"]


class LARC:
    """Wraps an optimizer, and scales each parameter's gradient before its step (arXiv:1708.03888).

    No step waits for the device. Give it to ``amp.initialize`` in place of the optimizer, or wrap the optimizer that
    ``initialize`` has returned.

    Args:
        optimizer: The optimizer.
        trust_coefficient: How large an update may be, relative to its parameter's norm.
        clip: Never exceed the optimizer's own learning rate; False multiplies it instead.
        eps: Added to the denominator.

    Example:
        >>> p = torch.full((1,), 2.0, requires_grad=True)
        >>> optimizer = LARC(torch.optim.SGD([p], lr=0.5), trust_coefficient=0.1)
        >>> (10 * p).sum().backward()
        >>> optimizer.step()  # by 0.1 * 2, where SGD alone steps by 0.5 * 10
        >>> p.detach()
        tensor([1.8000])
    """

    def __init__(self, optimizer: Any, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8) -> None:
        self.optim = optimizer
        self.trust_coefficient, self.clip, self.eps = trust_coefficient, clip, eps

    def __repr__(self) -> str:
        return repr(self.optim)

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state."""
        return self.optim.state

    @property
    def defaults(self) -> Any:
        """The wrapped optimizer's defaults."""
        return self.optim.defaults

    @property
    def param_groups(self) -> Any:
        """The wrapped optimizer's groups."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.optim.param_groups = value

    def state_dict(self) -> Any:
        """Return the wrapped optimizer's state dict."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the wrapped optimizer's state dict."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients, as the wrapped optimizer does."""
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: Any) -> None:
        """Add a group to the wrapped optimizer."""
        self.optim.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Scale the gradients, and step the wrapped optimizer, without weight decay: it is in the gradients.

        Args:
            closure: Called before, if given; its value is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.optim.param_groups
        decays = [group.get("weight_decay", 0) for group in groups]
        try:
            for group, decay in zip(groups, decays, strict=True):
                group["weight_decay"] = 0
                self._scale(group, decay)
            result = self.optim.step()
        finally:
            for group, decay in zip(groups, decays, strict=True):
                group["weight_decay"] = decay
        return result if closure is None else loss

    @torch.no_grad()
    def _scale(self, group: dict[str, Any], decay: float) -> None:
        by_device: dict[torch.device, list[Tensor]] = {}
        for p in group["params"]:
            if p.grad is not None:
                by_device.setdefault(p.device, []).append(p)
        for params in by_device.values():
            values, grads = [p.detach() for p in params], [p.grad.detach() for p in params]  # type: ignore[union-attr]
            of_values, of_grads = _norms(values), _norms(grads)
            rates = self.trust_coefficient * of_values / (of_grads + of_values * decay + self.eps)
            if self.clip:
                rates = (rates / group["lr"]).clamp(max=1.0)
            # Neither scaled nor decayed where a norm is 0, as in apex.
            is_left = (of_values == 0) | (of_grads == 0)
            if decay:
                decays = torch.where(is_left, 0.0, decay)
                foreach_add_(grads, foreach_mul(values, list(decays.unbind())))
            foreach_mul_(grads, list(torch.where(is_left, 1.0, rates).unbind()))


def _norms(tensors: list[Tensor]) -> Tensor:
    return torch.stack(foreach_norm(tensors, dtype=torch.float32))
