"""Casting a model to one dtype, and what goes into and comes out of it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from ..functions.containers import mapping_like, sequence_like
from ..torch_internals import BatchNorm
from .classes import passing_for, set_class
from .masters import LOW

__all__ = ["ForwardCast", "cast_forward", "cast_layers", "cast_module", "cast_tree", "uncast_forward"]

_ATTRIBUTE = "_mpamp_forward_cast"
_MARK = "_mpamp_casting"
_LAYERS = ("torch.nn.modules.", f"{__package__}.")
_OPAQUE = (str, bytes, nn.Module, torch.dtype, torch.device, torch.Generator, type, types.ModuleType)


def cast_tree(value: Any, dtype: torch.dtype) -> Any:
    """Return a model's argument or output with its floating tensors cast to ``dtype``, in nested containers too.

    Containers keep their class, and their identity where nothing in them changes. An object with a
    ``to`` method is asked for ``value.to(dtype)``; modules, arrays, strings and everything else pass.

    Example:
        >>> cast_tree({"x": torch.ones(1), "ids": torch.ones(1, dtype=torch.int64)}, torch.float16)
        {'x': tensor([1.], dtype=torch.float16), 'ids': tensor([1])}
    """
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if value is None or isinstance(value, _OPAQUE):
        return value
    if isinstance(value, MutableMapping):
        items = {key: cast_tree(item, dtype) for key, item in value.items()}
        return value if all(items[key] is item for key, item in value.items()) else mapping_like(value, items)
    if hasattr(value, "to") and callable(value.to):
        return value.to(dtype)
    if isinstance(value, list | tuple):
        found = [cast_tree(item, dtype) for item in value]
        return value if all(a is b for a, b in zip(found, value, strict=True)) else sequence_like(value, found)
    if isinstance(value, set | frozenset):
        found = [cast_tree(item, dtype) for item in value]
        return value if all(a is b for a, b in zip(found, value, strict=True)) else type(value)(found)
    if isinstance(value, types.GeneratorType):
        return (cast_tree(item, dtype) for item in value)
    return value


# -- A model's own tensors ---------------------------------------------------------------------------


def keeps_float32(module: nn.Module) -> bool:
    """Tell whether a module is a batch norm with weights, which ``keep_batchnorm_fp32`` leaves alone."""
    return isinstance(module, BatchNorm) and module.affine


def cast_module(model: nn.Module, dtype_of: Callable[[nn.Module, str], torch.dtype]) -> None:
    """Cast a model's floating parameters, buffers and gradients in place; every parameter stays the same object.

    Args:
        model: The model.
        dtype_of: Gives the dtype that a tensor of a module has afterwards, by the tensor's name there.
    """
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                _cast_parameter(parameter, dtype_of(module, name))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype_of(module, name))
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def _cast_parameter(parameter: torch.Tensor, dtype: torch.dtype) -> None:
    if parameter.dtype is dtype:
        return
    grad, parameter.grad = parameter.grad, None
    parameter.data = parameter.data.to(dtype)
    if grad is not None:
        parameter.grad = grad.to(dtype)


# -- Its forward -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForwardCast:
    """What a model's ``forward`` casts its arguments and its output to; None leaves them."""

    inputs: torch.dtype | None
    outputs: torch.dtype | None
    inner: Callable[..., Any] | None = None
    """A ``forward`` that the model had as an attribute of its own."""
    before: Callable[[], None] | None = None
    """What is called first, by compiled code not."""


def cast_forward(model: nn.Module, cast: ForwardCast) -> None:
    """Have a model's ``forward`` cast its arguments and its output.

    The model gets a subclass of its class, not a function bound to it: copies, replicas and unpickled models
    cast likewise, and each runs its own ``forward``.
    """
    uncast_forward(model)
    inner = model.__dict__.pop("forward", None)
    model.__dict__[_ATTRIBUTE] = cast if inner is None else replace(cast, inner=inner)
    set_class(model, _casting(type(model)))


def cast_layers(model: nn.Module) -> None:
    """Have torch's own layers, and apex's, cast their arguments to their weights' dtype, where it is lower precision.

    The two would not meet otherwise where a layer is reached by another way than the model's ``forward``.
    """
    for module in model.modules():
        own = {p.dtype for p in module._parameters.values() if p is not None and p.is_floating_point()}
        is_torchs = type(module).__module__.startswith(_LAYERS) and not isinstance(module, LazyModuleMixin)
        if module is not model and is_torchs and len(own) == 1 and own <= LOW:
            cast_forward(module, ForwardCast(own.pop(), None))


def uncast_forward(model: nn.Module) -> None:
    """Give a model its own class and ``forward`` back."""
    cast = model.__dict__.pop(_ATTRIBUTE, None)
    if cast is not None:
        set_class(model, type(model).__bases__[0])
        if cast.inner is not None:
            model.__dict__["forward"] = cast.inner


def _casting(cls: Any) -> Any:
    """Return the subclass of a module's class whose ``forward`` casts."""
    for known in type.__subclasses__(cls):
        if _MARK in vars(known):
            return known

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        cast = self.__dict__.get(_ATTRIBUTE)
        if cast is None:
            return cls.forward(self, *args, **kwargs)
        if cast.before is not None and not torch.compiler.is_compiling():
            cast.before()
        if cast.inputs is not None:
            args, kwargs = cast_tree(args, cast.inputs), cast_tree(kwargs, cast.inputs)
        inner = functools.partial(cls.forward, self) if cast.inner is None else cast.inner
        output = inner(*args, **kwargs)
        return output if cast.outputs is None else cast_tree(output, cast.outputs)

    def reduce_ex(self: Any, protocol: Any) -> Any:
        reduced = super(made, self).__reduce_ex__(protocol)
        if isinstance(reduced, tuple) and len(reduced) > 1 and reduced[1][:1] == (made,):
            return (_remake, (reduced[0], cls, *reduced[1][1:]), *reduced[2:])
        return reduced

    body = {_MARK: True, "forward": forward, "__reduce_ex__": reduce_ex}
    made = type(cls)(cls.__name__, (cls,), {**body, **passing_for(cls)})
    return made


def _remake(make: Callable[..., Any], cls: type[nn.Module], *args: Any) -> Any:
    """Make an empty instance of a casting class, for copies and pickles."""
    return make(_casting(cls), *args)


def floating_tensors(models: Iterable[nn.Module]) -> Iterable[tuple[str, str, torch.Tensor]]:
    """Yield every floating parameter and buffer with what it is and its name."""
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                yield "parameter", name, parameter
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                yield "buffer", name, buffer
