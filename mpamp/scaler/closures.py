"""Closures given to ``step``: run once by the scaler, or by the optimizer under the scaler's eyes, or refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import ScalerUsageError
from .gradients import parameters_of

__all__ = ["Closure", "Evaluations", "SkipStep", "is_torchs", "replace_closure", "take_closure"]

Closure = Callable[[], Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def take_closure(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    """Return the closure in the arguments of a call of ``step``.

    Raises:
        ScalerUsageError: The optimizer can't do without one. As LBFGS, it keeps between evaluations what a skip in
            their midst would corrupt.
    """
    closure: Closure | None = kwargs.get("closure")
    if closure is None and args and callable(args[0]):
        closure = args[0]
    if closure is not None and _needs_closure(optimizer):
        raise ScalerUsageError(
            f"{type(optimizer).__name__} evaluates its closure more than once in a step, so the gradients in between "
            "can't be unscaled and checked. Closure use is not supported for it if GradScaler is enabled: train it "
            "in float32 or bfloat16 with GradScaler(enabled=False)."
        )
    return closure


def replace_closure(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Closure | None) -> Arguments:
    """Return the arguments of a call of ``step`` with another closure in the place of the one that is there."""
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": closure}
    return (closure, *args[1:]), kwargs


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether ``step`` is one of torch's own: a closure may be called before it, which then is given none.

    Others may call theirs twice, as SAM does, or not before they have used the gradients that are there.
    """
    return getattr(type(optimizer).step, "__module__", "").startswith("torch.optim.")


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    try:
        parameter = inspect.signature(optimizer.step).parameters.get("closure")
    except (TypeError, ValueError):  # not written in Python
        return False
    return parameter is not None and parameter.default is inspect.Parameter.empty


class SkipStep(BaseException):
    """Ends an optimizer's step from within its closure. Not an Exception, which the optimizer might catch."""


class Evaluations:
    """A closure for an optimizer that calls it when, and as often, as it likes.

    After each call the gradients are unscaled and checked. The weights are kept, since an optimizer may have moved
    them when a later call finds an inf.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, closure: Closure, has_inf: Callable[[], bool]) -> None:
        self._closure = closure
        self._has_inf = has_inf
        self._weights: list[tuple[Tensor, Tensor]] = [(p, p.detach().clone()) for p in parameters_of(optimizer)]
        self.value: Any = None
        """What the closure returned last."""

    def __call__(self) -> Any:
        """Call the closure, unscale and check.

        Raises:
            SkipStep: The gradients have an inf or NaN.
        """
        with torch.enable_grad():
            self.value = self._closure()
        self.check()
        return self.value

    def check(self) -> None:
        """Unscale and check the gradients that are there.

        Raises:
            SkipStep: They have an inf or NaN.
        """
        if self._has_inf():
            raise SkipStep

    def put_back_weights(self) -> None:
        """Give the parameters the values that they had before the step."""
        with torch.no_grad():
            for param, weight in self._weights:
                param.copy_(weight)
