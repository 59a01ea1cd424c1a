"""What apex's fused optimizers have in common: groups that count their steps, and arithmetic in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...torch_internals import foreach_copy_
from ..errors import AmpNotImplementedError, AmpUsageError
from ..masters import LOW

__all__ = ["Bucket", "FusedOptimizer", "corrections", "device_of", "lr_on_device", "refuse_amsgrad"]


class Bucket:
    """Parameters of one group on one device, with their gradients and state, as lists that torch's fused ops take.

    Every list is in float32 (float64 parameters stay float64): lower-precision parameters and gradients are copied
    here, and ``write_back`` rounds the results into the parameters.
    """

    def __init__(self, params: list[Tensor], states: list[dict[str, Any]]) -> None:
        self.given, self.states = params, states
        self.params = [_wide(p.detach()) for p in params]
        self.grads = [_wide(p.grad.detach()).to(w.dtype) for p, w in zip(params, self.params, strict=True)]  # type: ignore[union-attr]

    def state(self, name: str) -> list[Tensor]:
        """Return one entry of the state, made of zeros, in the parameters' shapes, where there is none yet."""
        for p, state in zip(self.params, self.states, strict=True):
            if name not in state:
                state[name] = torch.zeros_like(p)
        return [state[name] for state in self.states]

    def write_back(self) -> None:
        """Copy what was computed on copies into the parameters: float32 -> the parameter's dtype."""
        pairs = [(p, w) for p, w in zip(self.given, self.params, strict=True) if p.dtype in LOW]
        if pairs:
            foreach_copy_([p.detach() for p, _ in pairs], [w for _, w in pairs])


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in LOW else tensor


class FusedOptimizer(Optimizer):
    """An optimizer whose groups step as one; ``_update`` is the arithmetic of a group's parameters on one device."""

    set_grad_none: bool

    def __init__(self, params: Any, defaults: dict[str, Any], set_grad_none: bool) -> None:
        super().__init__(params, defaults)
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients: set to None as the constructor's ``set_grad_none`` says, unless told otherwise."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; return what ``closure``, which is called before, returns.

        Raises:
            AmpNotImplementedError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_sparse()
        self._before_groups()
        for group in self.param_groups:
            if not group["params"]:
                continue
            self._count(group)
            for bucket in self._buckets(group):
                self._update(group, bucket)
                bucket.write_back()
        return loss

    def _refuse_sparse(self) -> None:
        if any(p.grad is not None and p.grad.is_sparse for p in self._params()):
            raise AmpNotImplementedError(
                f"{type(self).__name__} doesn't take sparse gradients: use torch.optim.SparseAdam for the parameters "
                "of embeddings with sparse=True."
            )

    def _before_groups(self) -> None:
        """Do what a step needs of all groups together."""

    def _count(self, group: dict[str, Any]) -> None:
        """Count a step of a group, whose parameters share one count, as apex's do."""
        group.setdefault("step", 0)
        group["step"] += 1

    def _buckets(self, group: dict[str, Any]) -> Iterator[Bucket]:
        """Yield a group's parameters that have gradients, by device and dtype."""
        found: dict[Any, list[Tensor]] = {}
        for p in group["params"]:
            if p.grad is None:
                continue
            found.setdefault((p.device, p.dtype), []).append(p)
        for params in found.values():
            yield self._bucket(params)

    def _bucket(self, params: list[Tensor]) -> Bucket:
        """Return parameters of one device and dtype as a bucket."""
        found = Bucket(params, [self.state[p] for p in params])
        if self._has_masters(params[0].dtype):
            found.params = [
                state.setdefault("master", wide) for state, wide in zip(found.states, found.params, strict=True)
            ]
        return found

    def _has_masters(self, dtype: torch.dtype) -> bool:
        """Tell whether parameters of a dtype have float32 masters of this optimizer's own."""
        return False

    def _update(self, group: dict[str, Any], bucket: Bucket) -> None:
        """Change a bucket's parameters and state in place."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, in float32 where it was saved in float32, whatever the parameters are."""
        super().load_state_dict(state_dict)
        for p, saved in zip(self._params(), self._saved(state_dict), strict=False):
            for name, value in saved.items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    self.state[p][name] = value.detach().clone().to(p.device)

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @staticmethod
    def _saved(state_dict: dict[str, Any]) -> list[dict[str, Any]]:
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        return [state_dict["state"].get(key, {}) for key in keys]


def corrections(group: dict[str, Any]) -> tuple[Any, Any]:
    """Return what Adam's two moments are divided by at a group's step; 1 where ``bias_correction`` is off.

    Example:
        >>> corrections({"bias_correction": True, "betas": (0.5, 0.75), "step": 2})
        (0.75, 0.4375)
    """
    if not group["bias_correction"]:
        return 1.0, 1.0
    (first, second), step = group["betas"], group["step"]
    step = step.reshape(()) if isinstance(step, Tensor) else step
    return 1 - first**step, 1 - second**step


def lr_on_device(group: dict[str, Any]) -> None:
    """Have a group's learning rate be a float32 tensor of its own, on the device of its parameters, if it has any."""
    device = device_of(group)
    group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device).clone()


def device_of(group: dict[str, Any]) -> torch.device:
    """Return the device of a group's first parameter; torch's default for a group that has none."""
    params = group["params"]
    return params[0].device if params else torch.get_default_device()


def refuse_amsgrad(optimizer: object, amsgrad: bool) -> None:
    """Refuse a variant that apex's optimizers have an argument for, and that they never had.

    Raises:
        AmpUsageError: It is asked for.
    """
    if amsgrad:
        raise AmpUsageError(
            f"{type(optimizer).__name__} has no AMSGrad variant: use torch.optim.AdamW(..., amsgrad=True, fused=True)."
        )
