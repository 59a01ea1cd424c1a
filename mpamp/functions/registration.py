"""Functions and ops of others that get a policy from outside: on any module, class or object, and by op name."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from ..devices.registry import get_backend, register_rules, unregister_rules
from ..errors import OpTableError, nearest
from ..locks import turn
from ..rules.optable import OpTable
from ..rules.policy import CastPolicy
from ..torch_internals import OpOverload
from .annotated import casting
from .boundcast import BoundCast
from .containers import is_container

__all__ = [
    "register",
    "register_float_function",
    "register_lower_precision_function",
    "register_op",
    "register_promote_function",
    "unregister",
    "unregister_float_function",
    "unregister_lower_precision_function",
    "unregister_op",
    "unregister_promote_function",
]


def register_lower_precision_function(module: Any, name: str) -> None:
    """Have ``module.name`` called as if ``lower_precision_function`` decorated it.

    Callers that look it up on ``module`` get the decorated one; a reference that was taken before, by
    ``from module import name``, stays as it was.

    Args:
        module: A module, a class (methods, also static and class methods) or an object.
        name: The function's name there. Once more is once; under another policy the latest holds.

    Raises:
        ValueError: There is no such function; the message names module and function.
        TypeError: It can't be decorated.

    Example:
        >>> import types
        >>> extension = types.SimpleNamespace(fused=lambda x: x.dtype)
        >>> register_lower_precision_function(extension, "fused")
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     extension.fused(torch.ones(2))
        torch.bfloat16
        >>> unregister_lower_precision_function(extension, "fused")
    """
    register(module, name, CastPolicy.LOWER_PRECISION_FP)


def register_float_function(module: Any, name: str) -> None:
    """Have ``module.name`` called with float32; otherwise as ``register_lower_precision_function``."""
    register(module, name, CastPolicy.FP32)


def register_promote_function(module: Any, name: str) -> None:
    """Have ``module.name`` called with its widest dtype; otherwise as ``register_lower_precision_function``."""
    register(module, name, CastPolicy.PROMOTE)


def unregister_lower_precision_function(module: Any, name: str) -> None:
    """Put back the very function that ``register_lower_precision_function`` found.

    Raises:
        ValueError: It isn't registered so, or something else has replaced it since.
    """
    unregister(module, name, CastPolicy.LOWER_PRECISION_FP)


def unregister_float_function(module: Any, name: str) -> None:
    """Put back the very function that ``register_float_function`` found; errors as its sibling's."""
    unregister(module, name, CastPolicy.FP32)


def unregister_promote_function(module: Any, name: str) -> None:
    """Put back the very function that ``register_promote_function`` found; errors as its sibling's."""
    unregister(module, name, CastPolicy.PROMOTE)


# -- Attributes that hold a decorated function -------------------------------------------------------

_MISSING = object()


@dataclass(frozen=True, slots=True)
class _Registration:
    owner: Any
    policy: CastPolicy
    found: Any
    """What stood there; ``_MISSING`` where it was inherited."""
    function: Any
    """What stands there now; a decorator on top of it may have copied its attributes."""


def register(owner: Any, name: str, policy: CastPolicy) -> None:
    """Replace ``owner.name`` by ``casting(owner.name, policy)``; the three functions above, by policy.

    Raises:
        ValueError, TypeError: As those.
    """
    with turn():
        present = _registration(owner, name)
        if present is not None and present.policy is policy:
            return
        if present is not None:
            unregister(owner, name, present.policy)
        own = _own(owner, name)
        decorated = _decorate(owner, name, _inherited(owner, name) if own is _MISSING else own, policy)
        if not isinstance(decorated, BoundCast):
            function = getattr(decorated, "__func__", decorated)
            function._mpamp_registration = _Registration(owner, policy, own, function)
        setattr(owner, name, decorated)


def unregister(owner: Any, name: str, policy: CastPolicy) -> None:
    """Put back what ``register`` found.

    Raises:
        ValueError: As ``unregister_lower_precision_function``.
    """
    with turn():
        present = _registration(owner, name)
        if present is None or present.policy is not policy:
            how = "" if present is None else f" but as {present.policy}"
            raise ValueError(
                f"function {name!r} of {_name(owner)} isn't registered as {policy}{how}; "
                "something that has replaced it since must be taken away first."
            )
        if present.found is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, present.found)


def _decorate(owner: Any, name: str, found: Any, policy: CastPolicy) -> Any:
    if isinstance(found, torch.nn.Module):
        raise TypeError(f"{name!r} of {_name(owner)} is a module: register its 'forward' instead.")
    try:
        if inspect.ismethod(found) and found.__self__ is owner and _is_bindable(owner, name, found):
            return BoundCast(owner, found.__func__, policy)  # type: ignore[arg-type]
        decorated = casting(found, policy)
    except TypeError as error:
        raise TypeError(f"{name!r} of {_name(owner)} can't be registered: {error}") from error
    # A class binds Python functions, but not built-in ones or other callables.
    is_static = isinstance(owner, type) and not hasattr(type(found), "__get__")
    return staticmethod(decorated) if is_static else decorated


def _is_bindable(owner: Any, name: str, found: Any) -> bool:
    """Tell whether a bound method is its class's plain one, on an object that isn't an argument to cast itself."""
    if is_container(owner) or isinstance(owner, type | torch.Tensor) or not type(owner).__weakrefoffset__:
        return False
    return inspect.getattr_static(type(owner), name, None) is found.__func__ and inspect.isfunction(found.__func__)


def _own(owner: Any, name: str) -> Any:
    """Return what the attribute itself holds, so a staticmethod and not its function."""
    return getattr(owner, "__dict__", {}).get(name, _MISSING)


def _inherited(owner: Any, name: str) -> Any:
    # Not of a class: a bound method, or what a module makes when asked.
    find = inspect.getattr_static if isinstance(owner, type) else getattr
    found = find(owner, name, _MISSING)
    if found is _MISSING:
        raise ValueError(f"no function named {name!r} in {_name(owner)}{nearest(name, dir(owner))}")
    return found


def _registration(owner: Any, name: str) -> _Registration | None:
    attribute = _own(owner, name)
    if isinstance(attribute, BoundCast):
        is_its = attribute._owner() is owner
        return _Registration(owner, attribute._policy, _MISSING, attribute) if is_its else None
    function = getattr(attribute, "__func__", attribute)
    found = getattr(function, "_mpamp_registration", None)
    is_ours = isinstance(found, _Registration) and found.owner is owner and found.function is function
    return found if is_ours else None


def _name(owner: Any) -> str:
    if isinstance(owner, ModuleType):
        return f"module {owner.__name__}"
    return owner.__qualname__ if isinstance(owner, type) else f"a {type(owner).__qualname__}"


# -- Ops ---------------------------------------------------------------------------------------------


def register_op(op: Any, policy: Any, device: str | torch.device | None = None) -> None:
    """Give an op, such as a custom one of ``torch.library``, a policy in every region.

    It goes on top of the device's table and of plugins' rules; ``set_op_rules`` and ``ops=`` go on top of
    it. Registering an op again replaces its policy.

    Args:
        op: ``"ns::op"`` for all of its overloads, ``"ns::op.overload"`` for one; or the op itself.
        policy: A ``CastPolicy``, its name, or a mapping from dtype to policy.
        device: The device type. None is every device, those that are first used later too.

    Raises:
        UnknownOpError: torch has no such op, or it writes into its arguments.
        UnknownPolicyError: There is no such policy.
        OpTableError: The op can't have that policy.
        UnknownDeviceError: No backend covers the device.

    Example:
        >>> from mpamp import get_op_table
        >>> register_op("aten::gelu", "fp32", "cpu")
        >>> get_op_table("cpu").policy("gelu")
        <CastPolicy.FP32: 'fp32'>
        >>> unregister_op("aten::gelu", "cpu")
        >>> get_op_table("cpu").policy("gelu") is None
        True
    """
    rows = OpTable({_op_name(op): policy}, source="registered")
    device_type = _device_type(device)
    register_rules(device_type, rows)


def unregister_op(op: Any, device: str | torch.device | None = None) -> None:
    """Take back ``register_op`` of the same op and device.

    Raises:
        UnknownOpError: torch has no such op.
        OpTableError: It isn't registered.
    """
    name, device_type = _op_name(op), _device_type(device)
    if not unregister_rules(device_type, list(OpTable({name: CastPolicy.FALLTHROUGH}))):
        raise OpTableError(f"{name} isn't registered for {device_type or 'every device'}.")


def _op_name(op: Any) -> str:
    if isinstance(op, OpOverload):
        return f"{op._schema.name}.{op._schema.overload_name or 'default'}"
    for candidate in (op, getattr(op, "_qualified_op_name", None), getattr(op, "_qualname", None)):
        if isinstance(candidate, str):
            return candidate
    raise TypeError(f"an op is named by a string such as 'my_lib::op', or is one of torch.ops; got {op!r}.")


def _device_type(device: str | torch.device | None) -> str | None:
    return None if device is None else get_backend(device).device_type
