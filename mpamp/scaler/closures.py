"""Closures given to ``step``: run once by the scaler, or refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..errors import ScalerUsageError

__all__ = ["take_closure"]

Closure = Callable[[], Any]


def take_closure(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Closure | None, tuple[Any, ...], dict[str, Any]]:
    """Return (closure, args, kwargs) of a call of ``step``, with None left in the closure's place.

    Raises:
        ScalerUsageError: The optimizer can't do without the closure: it would call it again, with other parameters,
            and its gradients would be neither unscaled nor checked.
    """
    closure = kwargs.get("closure")
    if closure is not None:
        kwargs = {**kwargs, "closure": None}
    elif args and callable(args[0]):
        closure, args = args[0], (None, *args[1:])
    if closure is not None and _needs_closure(optimizer):
        raise ScalerUsageError(
            f"{type(optimizer).__name__} evaluates its closure more than once in a step, so the gradients in between "
            "can't be unscaled and checked. Closure use is not supported for it if GradScaler is enabled: train it "
            "in float32 or bfloat16 with GradScaler(enabled=False)."
        )
    return closure, args, kwargs


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    parameter = inspect.signature(optimizer.step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty
