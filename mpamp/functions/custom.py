"""custom_fwd and custom_bwd: autograd Functions whose backward runs in the autocast state of their forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
from torch.autograd.function import FunctionCtx

from ..devices.registry import device_state, served_type
from ..engine.compiling import is_compiling
from ..errors import RegionError, UnsupportedDtypeError
from ..regions.saved import DeviceAutocast, run_in, run_without
from ..rules.rows import parse_dtype
from .containers import autocast_types, has_autocast, map_tensors, tensors_in
from .setuplink import SetupLink, watch, watch_while_tracing

__all__ = ["custom_bwd", "custom_fwd"]

F = TypeVar("F", bound=Callable[..., Any])
_NO_CONTEXT = (torch.Tensor, type(None))


@overload
def custom_fwd(fwd: F, *, device_type: str | None = None, cast_inputs: torch.dtype | str | None = None) -> F: ...
@overload
def custom_fwd(
    fwd: None = None, *, device_type: str | None = None, cast_inputs: torch.dtype | str | None = None
) -> Callable[[F], F]: ...
def custom_fwd(fwd: Any = None, *, device_type: str | None = None, cast_inputs: torch.dtype | str | None = None) -> Any:
    """Decorate the ``forward`` of a ``torch.autograd.Function``: its autocast state is kept for ``custom_bwd``.

    Works for both styles of Functions: ``forward(ctx, ...)``, and ``forward(...)`` with a ``setup_context``
    of its own, which needs no decorator.

    Args:
        fwd: The function; without it a decorator is returned.
        device_type: Whose autocast state counts. None is that of each device that the tensors among the inputs
            are on.
        cast_inputs: Within a region, cast the floating inputs on its device, except float64 ones, to this dtype
            and run ``forward`` and ``backward`` with autocast off. Inputs in nested lists, tuples and mappings
            are cast too, and the containers keep their class. Outside of regions it has no effect.

    Raises:
        ValueError: ``device_type`` is no string.
        TypeError: ``fwd`` isn't callable, or ``cast_inputs`` is no dtype.
        UnknownDeviceError: When it is called: torch can't autocast ``device_type``.

    Example:
        >>> class Square(torch.autograd.Function):
        ...     @staticmethod
        ...     @custom_fwd(cast_inputs=torch.float32)
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x * x
        ...
        ...     @staticmethod
        ...     @custom_bwd
        ...     def backward(ctx, grad):
        ...         return 2 * ctx.saved_tensors[0] * grad
        >>> x = torch.ones(2, dtype=torch.bfloat16)
        >>> with torch.autocast("cpu"):
        ...     Square.apply(x).dtype
        torch.float32
    """
    _check(fwd, "custom_fwd", device_type)
    if isinstance(cast_inputs, str):
        cast_inputs = parse_dtype(cast_inputs, UnsupportedDtypeError)
    if cast_inputs is not None and not isinstance(cast_inputs, torch.dtype):
        raise TypeError(f"cast_inputs is a torch.dtype or None, got {cast_inputs!r}.")
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)
    link = SetupLink(lambda setup: _setup_context(setup, device_type, cast_inputs))
    key = link.key  # Dynamo can't look into closures over objects

    @functools.wraps(fwd)
    def forward(*args: Any, **kwargs: Any) -> Any:
        types = _types(device_type, (args, kwargs))
        if args and isinstance(args[0], FunctionCtx):
            _save(args[0], types, cast_inputs)
        elif is_compiling():
            watch_while_tracing(key)
        elif not watch(key) and args and not isinstance(args[0], _NO_CONTEXT):
            _save(args[0], types, cast_inputs)  # what stands for a context where forward is called by hand
        active = _active(types, cast_inputs)
        if not active:
            return fwd(*args, **kwargs)
        args, kwargs = _cast((args, kwargs), active, cast_inputs)
        return run_without(active, fwd, args, kwargs)

    link.bind(forward)
    return forward


@overload
def custom_bwd(bwd: F, *, device_type: str | None = None) -> F: ...
@overload
def custom_bwd(bwd: None = None, *, device_type: str | None = None) -> Callable[[F], F]: ...
def custom_bwd(bwd: Any = None, *, device_type: str | None = None) -> Any:
    """Decorate the ``backward`` of a ``torch.autograd.Function``: it runs in the autocast state of its forward.

    On, off, dtype and op table are those of the call of ``forward``, which ``custom_fwd`` decorates, whatever
    region surrounds the call of ``backward()`` and whichever thread runs it.

    Args:
        bwd: The function; without it a decorator is returned.
        device_type: Restore the state of this device only. None restores every device that ``custom_fwd`` saw.

    Raises:
        ValueError: ``device_type`` is no string.
        TypeError: ``bwd`` isn't callable.
        RegionError: When it is called: ``forward`` isn't decorated.

    Example:
        >>> custom_bwd(lambda ctx, grad: grad, device_type="cpu").__name__
        '<lambda>'
    """
    _check(bwd, "custom_bwd", device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def backward(*args: Any, **kwargs: Any) -> Any:
        return run_in(_saved(device_type, args), bwd, args, kwargs)

    return backward


def _check(function: Any, name: str, device_type: Any) -> None:
    if device_type is not None and not isinstance(device_type, str):
        raise ValueError(f"device_type is a str or None, got {type(device_type).__name__}.")
    if function is not None and not callable(function):
        raise TypeError(f"{name} decorates functions, got {function!r}; its arguments go by keyword.")


def _types(device_type: str | None, inputs: Any) -> tuple[str, ...]:
    """Return the devices whose autocast state counts."""
    if device_type is None:
        return autocast_types(tensors_in(inputs))
    if not is_compiling() and not has_autocast(device_type):
        device_state(device_type)  # raises, and lists the known ones
    return (served_type(device_type),)


def _active(types: tuple[str, ...], cast_inputs: torch.dtype | None) -> tuple[str, ...]:
    """Return the devices whose inputs are cast here and now."""
    return () if cast_inputs is None else tuple(t for t in types if torch.is_autocast_enabled(t))


def _cast(inputs: Any, active: tuple[str, ...], dtype: torch.dtype | None) -> Any:
    return map_tensors(inputs, lambda tensor: tensor.to(dtype), lambda tensor: _is_eligible(tensor, active))


def _is_eligible(tensor: torch.Tensor, types: tuple[str, ...]) -> bool:
    return tensor.is_floating_point() and tensor.dtype is not torch.float64 and tensor.device.type in types


# -- From forward to backward ------------------------------------------------------------------------


def _setup_context(
    setup: Callable[..., Any], device_type: str | None, cast_inputs: torch.dtype | None
) -> Callable[..., Any]:
    """Return a ``setup_context`` that keeps the state, and gets the inputs that forward got."""

    @functools.wraps(setup)
    def setup_context(ctx: Any, inputs: Any, output: Any) -> Any:
        types = _types(device_type, inputs)
        active = _active(types, cast_inputs)
        result = setup(ctx, _cast(inputs, active, cast_inputs) if active else inputs, output)
        _save(ctx, types, cast_inputs)  # last, for a base class may have kept the state by a rule of its own
        return result

    return setup_context


def _save(ctx: Any, types: tuple[str, ...], cast_inputs: torch.dtype | None) -> None:
    states = tuple([DeviceAutocast.now(t, is_off=cast_inputs is not None) for t in types])
    ctx._mpamp_autocast = states
    for state in states:
        if state is states[0] or (state.enabled and not ctx._fwd_used_autocast):
            ctx._fwd_used_autocast, ctx._dtype = state.enabled, state.dtype  # what torch.amp.custom_bwd reads


def _saved(device_type: str | None, args: tuple[Any, ...]) -> tuple[DeviceAutocast, ...]:
    ctx = args[0]
    if hasattr(ctx, "_mpamp_autocast"):
        states: tuple[DeviceAutocast, ...] = ctx._mpamp_autocast
        if device_type is None:
            return states
        states = tuple(s for s in states if s.device_type == served_type(device_type))
        if states:
            return states
    if not hasattr(ctx, "_fwd_used_autocast"):
        raise RegionError("custom_bwd needs the state that custom_fwd keeps: decorate this Function's forward too.")
    # torch.amp.custom_fwd was here, or one for another device: then torch's rule holds.
    types = autocast_types(tensors_in(args)) if device_type is None else (served_type(device_type),)
    return tuple(DeviceAutocast(t, ctx._fwd_used_autocast, ctx._dtype) for t in types)
