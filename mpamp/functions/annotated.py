"""Functions that autocast can't see, such as extensions' own: decorators that cast their arguments by a policy."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from ..regions.saved import run_without
from ..rules.policy import CASTABLE, CastPolicy, target_dtype
from .containers import autocast_types, map_tensors, tensors_in

__all__ = ["casting", "float_function", "lower_precision_function", "promote_function"]

F = TypeVar("F", bound=Callable[..., Any])
Tensor = torch.Tensor
POLICIES = (CastPolicy.LOWER_PRECISION_FP, CastPolicy.FP32, CastPolicy.PROMOTE, CastPolicy.BANNED)
"""What can be done to a function's arguments; the other policies need an op's schema."""


def lower_precision_function(function: F) -> F:
    """Decorate a function to be called with the region's dtype.

    In a region of the device that its tensor arguments are on, mpamp's or torch's, the eligible ones are
    cast, also in nested lists, tuples and mappings: floating tensors on that device. A call with any float64
    tensor is left alone. The casts are the function's own, made at each call. It runs with autocast off on that
    device. Outside of regions it is called as if it weren't decorated.

    Raises:
        TypeError: It isn't callable, it is a class, or it is a generator or async function, whose body would
            run after the call.

    Example:
        >>> @lower_precision_function
        ... def fused(x, weights):
        ...     return x.dtype, weights["a"].dtype
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     fused(torch.ones(2), {"a": torch.ones(2)})
        (torch.bfloat16, torch.bfloat16)
        >>> fused(torch.ones(2), {"a": torch.ones(2)})
        (torch.float32, torch.float32)
    """
    return cast(F, casting(function, CastPolicy.LOWER_PRECISION_FP))


def float_function(function: F) -> F:
    """Decorate a function to be called with float32; as ``lower_precision_function`` but for the dtype.

    Example:
        >>> @float_function
        ... def loss(x):
        ...     return x.dtype
        >>> with torch.autocast("cpu"):
        ...     loss(torch.ones(2, dtype=torch.bfloat16))
        torch.float32
    """
    return cast(F, casting(function, CastPolicy.FP32))


def promote_function(function: F) -> F:
    """Decorate a function to be called with the widest dtype of its arguments; otherwise as the others.

    Two different 16-bit dtypes meet in float32.

    Example:
        >>> @promote_function
        ... def join(x, y):
        ...     return x.dtype, y.dtype
        >>> with torch.autocast("cpu"):
        ...     join(torch.ones(2), torch.ones(2, dtype=torch.bfloat16))
        (torch.float32, torch.float32)
    """
    return cast(F, casting(function, CastPolicy.PROMOTE))


def casting(function: Any, policy: CastPolicy | str) -> Any:
    """Return ``function`` with its arguments cast by a policy in regions: what the three decorators share.

    Raises:
        TypeError: As ``lower_precision_function``.
        ValueError: The policy isn't one for functions.

    Example:
        >>> casting(max, "banned").__name__
        'max'
    """
    policy = CastPolicy.parse(policy)
    if policy not in POLICIES:
        raise ValueError(f"{policy} is for ops only; a function can be {', '.join(map(str, POLICIES))}.")
    if isinstance(function, staticmethod | classmethod):
        return type(function)(casting(function.__func__, policy))
    _check(function)
    name = getattr(function, "__qualname__", type(function).__name__)

    @functools.wraps(function, updated=("__dict__",) if inspect.isfunction(function) else ())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        tensors = tensors_in((args, kwargs))
        active = tuple([t for t in autocast_types(tensors) if torch.is_autocast_enabled(t)])
        if not active:
            return function(*args, **kwargs)
        targets = _targets(policy, name, active, tensors)
        # Anew, weights too: a function may write into its arguments, return them and put hooks on them.
        args, kwargs = _cast_all((args, kwargs), targets, lambda t: t.to(targets[t.device.type]))
        return run_without(active, function, args, kwargs)

    wrapper.__script_unsupported = "a decorated function is not supported in script mode"  # type: ignore[attr-defined]
    return wrapper


def _check(function: Any) -> None:
    if isinstance(function, type) or not callable(function):
        raise TypeError(f"this decorates functions, got {function!r}; for a class, decorate or register its methods.")
    is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    if is_async or inspect.isgeneratorfunction(function):
        raise TypeError(
            f"{function.__qualname__} is a generator or async function: its body runs after the call, where its "
            "arguments' dtype can't be kept. Decorate the functions that it calls."
        )


def _targets(policy: CastPolicy, name: str, active: tuple[str, ...], tensors: list[Tensor]) -> dict[str, torch.dtype]:
    """Return the dtype that the eligible tensors on each device are cast to; none where they are left alone."""
    found: dict[str, torch.dtype] = {}
    if any(t.dtype is torch.float64 for t in tensors):
        return found
    for device_type in active:
        dtypes = [t.dtype for t in tensors if t.device.type == device_type and t.dtype in CASTABLE]
        target = target_dtype(policy, name, torch.get_autocast_dtype(device_type), dtypes)
        if target is not None:
            found[device_type] = target
    return found


def _cast_all(values: Any, targets: dict[str, torch.dtype], cast_one: Callable[[Tensor], Tensor]) -> Any:
    def is_eligible(tensor: Tensor) -> bool:
        target = targets.get(tensor.device.type)
        return target is not None and tensor.dtype is not target and tensor.dtype in CASTABLE

    return map_tensors(values, cast_one, is_eligible)
