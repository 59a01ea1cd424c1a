"""``initialize`` and ``shutdown``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import engine
from ..devices.registry import devices_in_use
from . import ambient, blocks, distributed
from . import attachment as _attachment
from .casting import (
    ForwardCast,
    cast_forward,
    cast_layers,
    cast_module,
    floating_tensors,
    keeps_float32,
    uncast_forward,
)
from .checkpoint import load_state_dict
from .errors import AmpTypeError, AmpUsageError
from .fp16_utils.optimizer import FP16_Optimizer
from .handle import init
from .holding import is_optimizer, with_wrapped
from .masters import forget, master_of
from .masterstash import refuse_dtype
from .properties import Properties, choose
from .scaler import LossScaler
from .state import state, warn_or_raise
from .statedicts import follow_state_dicts
from .undo import Undo

__all__ = ["initialize", "master_params", "shutdown"]

_models: weakref.WeakKeyDictionary[nn.Module, _Cast] = weakref.WeakKeyDictionary()


class _Cast:
    """What was done to a model, and what undoes it."""

    def __init__(self, model: nn.Module) -> None:
        self.dtypes: weakref.WeakKeyDictionary[nn.Module, dict[str, torch.dtype]] = weakref.WeakKeyDictionary()
        for module in model.modules():
            own = {**module._parameters, **module._buffers}
            self.dtypes[module] = {name: tensor.dtype for name, tensor in own.items() if tensor is not None}
        self.handles: list[Any] = []


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    patch_torch_functions_type: torch.dtype | None = None,
    allow_banned: bool = False,
) -> Any:
    """Prepare models and optimizers for mixed precision, in place; call it again to start over with others.

    Args:
        models: A module, or a list or tuple of modules, in float32, not yet wrapped for data parallelism.
        optimizers: An optimizer, a list or tuple of them, or None. Any object with ``param_groups`` and ``step`` will
            do; optimizers that it wraps go with it.
        enabled: False returns models and optimizers as they are.
        opt_level: "O0" float32; "O1" functions cast their arguments to float16, "O4" to bfloat16; "O2" a float16
            model with float32 batch norm and master weights, "O5" a bfloat16 one; "O3" float16 throughout.
        cast_model_type: Overrides what the model is cast to; False casts nothing.
        patch_torch_functions: False leaves functions alone in O1 and O4.
        keep_batchnorm_fp32: Overrides whether batch norm keeps float32.
        master_weights: Overrides whether the optimizer steps float32 copies.
        loss_scale: Overrides the loss scale: "dynamic" or a number.
        cast_model_outputs: What the models' outputs are cast to; float32 where the model is cast.
        num_losses: How many loss scalers there are.
        verbosity: 0 prints nothing.
        min_loss_scale: A dynamic scale isn't halved below it; None is 2**-16.
        max_loss_scale: A dynamic scale isn't doubled above it.
        patch_torch_functions_type: As ROCm's apex has it; follows from the opt_level.
        allow_banned: Run ``binary_cross_entropy`` in float32 in O1 and O4 instead of refusing it.

    Returns:
        What was given: the very objects, and ``models`` alone if ``optimizers`` is None.

    Raises:
        AmpTypeError: Models or optimizers are neither one nor a list.
        AmpAttributeError: An optimizer has no groups or no ``step``.
        AmpUsageError: An unknown opt_level, an override that it doesn't allow, a model that isn't in float32 or is
            wrapped already, or an optimizer that was passed before.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> model.weight.dtype, next(master_params(optimizer)).dtype, model(torch.ones(1, 2)).dtype
        (torch.float16, torch.float32, torch.float32)
        >>> shutdown()
    """
    properties = Properties()
    given = {name: value for name, value in locals().items() if name in properties.options and name != "opt_level"}
    with Undo() as undo:
        undo.also(_remembered())
        state.verbosity = verbosity
        if not enabled:
            ambient.withdraw()
            state.reset()
            state.opt_properties = properties
            return models if optimizers is None else (models, optimizers)
        choose(properties, opt_level, given)
        model_list, optimizer_list = _lists(models, optimizers)
        _check_models(model_list, is_cast=bool(properties.cast_model_type or cast_model_outputs))
        _check_optimizers(optimizer_list, model_list if properties.master_weights else None)
        undo.remember(model_list, optimizer_list)
        state.min_loss_scale, state.max_loss_scale = min_loss_scale, max_loss_scale
        state.opt_properties = properties
        state.loss_scalers = [
            LossScaler(properties.loss_scale, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale)
            for _ in range(num_losses)
        ]
        loaded, state.loaded = state.loaded, None
        if loaded is not None:
            load_state_dict(loaded)
        with blocks.casts_off():
            _cast(model_list, optimizer_list, properties, cast_model_outputs)
        state.__dict__.pop("handle", None)
        if properties.patch_torch_functions:
            _init_handle(model_list, properties, verbosity, allow_banned)
        else:
            ambient.withdraw()
        alone = optimizers is None or (not optimizer_list and not isinstance(optimizers, list | tuple))
        return models if alone else (models, optimizers)


def _remembered() -> Callable[[], None]:
    """Return what puts everything that the process shares back as it is now."""
    values, regions, served = dict(vars(state)), ambient.now(), distributed.is_served()
    casts = {model: list(cast.handles) for model, cast in _models.items()}
    attached = _attachment.attached()

    def put_back() -> None:
        ambient.put_back(regions)
        vars(state).clear()
        vars(state).update(values)
        for model, cast in list(_models.items()):
            if model in casts:
                cast.handles[:] = casts[model]
            else:
                del _models[model]
        _attachment.only_attached(attached)
        if not served:
            distributed.leave_data_parallel()

    return put_back


def _init_handle(models: list[nn.Module], properties: Properties, verbosity: int, allow_banned: bool) -> None:
    init(
        loss_scale=properties.loss_scale,
        verbose=verbosity == 2,
        allow_banned=allow_banned,
        dtype=properties.patch_torch_functions_type,
        devices={tensor.device.type for _, _, tensor in floating_tensors(models)},
    )


# -- Checks, before anything changes -----------------------------------------------------------------


def _lists(models: Any, optimizers: Any) -> tuple[list[nn.Module], list[Any]]:
    is_model = lambda value: isinstance(value, nn.Module)  # noqa: E731
    found = _list(models, is_model, "models must be either a single model or a list of models")
    text = "optimizers must be either a single optimizer or a list of optimizers"
    return found, [] if optimizers is None else _list(optimizers, is_optimizer, text)


def _list(value: Any, is_one: Callable[[Any], bool], text: str) -> list[Any]:
    if is_one(value):
        return [value]
    if isinstance(value, list | tuple) and all(map(is_one, value)):
        return list(value)
    name = type(value).__name__
    if isinstance(value, list | tuple):
        inside = ", ".join(sorted({type(item).__name__ for item in value})) or "nothing"
        name = f"a {name} of {inside}"
    raise AmpTypeError(f"{text}; got {name}.")


def _check_models(models: list[nn.Module], *, is_cast: bool) -> None:
    for model in models:
        if is_cast and isinstance(model, torch.jit.ScriptModule):
            raise AmpUsageError("a scripted model's forward can't be changed: pass it to amp.initialize unscripted.")
        parallel = (nn.parallel.DistributedDataParallel, nn.DataParallel)
        if isinstance(model, parallel):
            raise AmpUsageError(
                f"a model is already wrapped in {type(model).__name__}. Pass the plain model to amp.initialize, and "
                "wrap what it returns."
            )
    if state.allow_incoming_model_not_fp32:
        return
    for kind, name, tensor in floating_tensors(models):
        if tensor.dtype is torch.float16:
            warn_or_raise(
                f"found {kind} {name} with type {tensor.dtype}. amp.initialize casts the model itself, from float32: "
                "don't call .half() on it before."
            )


def _check_optimizers(optimizers: list[Any], models: list[nn.Module] | None) -> None:
    """Refuse optimizers that amp can't take; ``models`` are those that it casts, where it keeps master weights."""
    for optimizer in optimizers:
        if any(isinstance(each, FP16_Optimizer) for each in with_wrapped(optimizer)):
            raise AmpUsageError(
                "an FP16_Optimizer has masters and a loss scale of its own: give amp.initialize the optimizer inside "
                "of it, or train without amp, by optimizer.backward(loss)."
            )
    _attachment.refuse_attached(optimizers)
    if models is None:
        return
    of_models = {id(p) for model in models for p in model.parameters()}
    for optimizer in optimizers:
        for p in master_params(optimizer):
            if id(p) not in of_models and p.requires_grad:
                refuse_dtype(p)


# -- Changing models and optimizers ------------------------------------------------------------------


def _cast(models: list[nn.Module], optimizers: list[Any], properties: Properties, outputs: torch.dtype | None) -> None:
    dtype = properties.cast_model_type or None

    def dtype_of(module: nn.Module, name: str) -> torch.dtype:
        return torch.float32 if properties.keep_batchnorm_fp32 and keeps_float32(module) else properties.cast_model_type

    exact = _exact_values(optimizers) if properties.master_weights else None
    for model in models:
        if model not in _models:
            _models[model] = _Cast(model)
        if dtype is not None:
            cast_module(model, dtype_of)
            cast_layers(model)
            if not _models[model].handles:
                _models[model].handles = follow_state_dicts(model)
        if dtype is not None or outputs is not None:
            outputs = outputs or (None if dtype is None else torch.float32)
            before = _attachment.catch_up if properties.master_weights else None
            cast_forward(model, ForwardCast(dtype, outputs, before=before))
    for optimizer in optimizers:
        _attachment.attach(optimizer, exact)
    distributed.serve_data_parallel()


def _exact_values(optimizers: list[Any]) -> dict[Tensor, Tensor]:
    """Return the values that masters start from: the parameters' own, before the model is cast."""
    params = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    return {p: _exact_value(p) for p in params if p.is_floating_point() and p.requires_grad}


def _exact_value(p: Tensor) -> Tensor:
    master = master_of(p)
    return (p if master is None else master.weight).detach()  # casting gives the parameter other memory


def shutdown() -> None:
    """Take back everything that ``initialize`` and ``init`` did; they may be called again afterwards.

    Process-wide casts end. Models get their own ``forward`` and the dtypes that they came with, with the master
    weights' values; optimizers get the models' parameters back. Calling it again does nothing.

    Raises:
        AmpUsageError: Inside ``disable_casts`` or a step.
    """
    ambient.withdraw()
    for device in devices_in_use():
        engine.tidy(device)
    for attachment in _attachment.attached():
        attachment.stop()
    for model, cast in list(_models.items()):
        _restore(model, cast)
    _models.clear()
    distributed.leave_data_parallel()
    state.reset()


def _restore(model: nn.Module, cast: _Cast) -> None:
    for handle in cast.handles:
        handle.remove()
    for module in {*cast.dtypes, *model.modules()}:
        uncast_forward(module)
    cast_module(model, lambda module, name: cast.dtypes.get(module, {}).get(name, torch.float32))
    for tensor in [*model.parameters(), *model.buffers()]:
        forget(tensor)


# -- Parameters --------------------------------------------------------------------------


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Yield what an optimizer steps, masters where it has them: clip these after ``scale_loss``, not the model's.

    Example:
        >>> optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
        >>> next(master_params(optimizer)).shape
        torch.Size([2])
    """
    for group in optimizer.param_groups:
        yield from group["params"]
