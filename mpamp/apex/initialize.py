"""``initialize`` and ``shutdown``."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import kernels
from ..registry import devices_in_use
from . import ambient
from . import optimizers as _optimizers
from .casting import ForwardCast, cast_forward, cast_module, floating_tensors, keeps_float32, uncast_forward
from .checkpoint import load_state_dict
from .distributed import serve_data_parallel
from .errors import AmpTypeError, AmpUsageError
from .handle import init
from .masters import follow_state_dicts, master_of
from .properties import Properties, choose
from .scaler import LossScaler
from .state import state, warn_or_raise

__all__ = ["initialize", "master_params", "shutdown"]

_models: weakref.WeakKeyDictionary[nn.Module, _Cast] = weakref.WeakKeyDictionary()
_attached: weakref.WeakSet[Optimizer] = weakref.WeakSet()


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
        models: A module or a list of modules, in float32, not yet wrapped for data parallelism.
        optimizers: An optimizer, a list of them, or None.
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
    state.verbosity = verbosity
    properties = Properties()
    if not enabled:
        ambient.withdraw()
        state.reset()
        state.opt_properties = properties
        return models if optimizers is None else (models, optimizers)
    given = {name: value for name, value in locals().items() if name in properties.options and name != "opt_level"}
    choose(properties, opt_level, given)
    model_list, optimizer_list = _lists(models, optimizers)
    _check_models(model_list, is_cast=bool(properties.cast_model_type or cast_model_outputs))
    _check_optimizers(optimizer_list, model_list if properties.master_weights else None)
    scalers = [
        LossScaler(properties.loss_scale, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale)
        for _ in range(num_losses)
    ]
    ambient.withdraw()
    state.__dict__.pop("handle", None)
    if properties.patch_torch_functions:
        _init_handle(model_list, properties, verbosity, allow_banned)
    state.min_loss_scale, state.max_loss_scale = min_loss_scale, max_loss_scale
    state.opt_properties, state.loss_scalers = properties, scalers
    _cast(model_list, optimizer_list, properties, cast_model_outputs)
    loaded, state.loaded = state.loaded, None
    if loaded is not None:
        load_state_dict(loaded)
    if optimizers is None or (not optimizer_list and not isinstance(optimizers, list)):
        return models
    return models, optimizers


def _init_handle(models: list[nn.Module], properties: Properties, verbosity: int, allow_banned: bool) -> None:
    init(
        loss_scale=properties.loss_scale,
        verbose=verbosity == 2,
        allow_banned=allow_banned,
        dtype=properties.patch_torch_functions_type,
        devices={tensor.device.type for _, _, tensor in floating_tensors(models)},
    )


# -- Checks, before anything changes -----------------------------------------------------------------


def _lists(models: Any, optimizers: Any) -> tuple[list[nn.Module], list[Optimizer]]:
    if isinstance(models, nn.Module):
        model_list = [models]
    elif isinstance(models, list) and all(isinstance(model, nn.Module) for model in models):
        model_list = models
    else:
        raise AmpTypeError(f"models must be either a single model or a list of models; got {_named(models)}.")
    if optimizers is None:
        return model_list, []
    if isinstance(optimizers, Optimizer):
        return model_list, [optimizers]
    if isinstance(optimizers, list) and all(isinstance(optimizer, Optimizer) for optimizer in optimizers):
        return model_list, optimizers
    raise AmpTypeError(
        f"optimizers must be either a single optimizer or a list of optimizers; got {_named(optimizers)}."
    )


def _named(value: Any) -> str:
    name = type(value).__name__
    if isinstance(value, list | tuple):
        inside = ", ".join(sorted({type(item).__name__ for item in value})) or "nothing"
        return f"a {name} of {inside}" + ("; write it as a list" if isinstance(value, tuple) else "")
    return name


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


def _check_optimizers(optimizers: list[Optimizer], models: list[nn.Module] | None) -> None:
    """Refuse optimizers that amp can't take; ``models`` are those that it casts, where it keeps master weights."""
    if len({id(optimizer) for optimizer in optimizers}) < len(optimizers):
        raise AmpUsageError("an optimizer should only be passed through amp.initialize once; one is listed twice.")
    for optimizer in optimizers:
        _optimizers.refuse_attached(optimizer)
    if models is None:
        return
    of_models = {id(p) for model in models for p in model.parameters()}
    for optimizer in optimizers:
        for p in master_params(optimizer):
            if id(p) not in of_models and p.requires_grad:
                _optimizers.refuse_dtype(p)


# -- Changing models and optimizers ------------------------------------------------------------------


def _cast(
    models: list[nn.Module], optimizers: list[Optimizer], properties: Properties, outputs: torch.dtype | None
) -> None:
    dtype = properties.cast_model_type or None

    def dtype_of(module: nn.Module, name: str) -> torch.dtype:
        return torch.float32 if properties.keep_batchnorm_fp32 and keeps_float32(module) else properties.cast_model_type

    exact = _exact_values(optimizers) if properties.master_weights else None
    for model in models:
        if model not in _models:
            _models[model] = _Cast(model)
        if dtype is not None:
            cast_module(model, dtype_of)
            if not _models[model].handles:
                _models[model].handles = follow_state_dicts(model)
        if dtype is not None or outputs is not None:
            cast_forward(model, ForwardCast(dtype, outputs or (None if dtype is None else torch.float32)))
    for optimizer in optimizers:
        _optimizers.attach(optimizer, exact)
        _attached.add(optimizer)
    serve_data_parallel()


def _exact_values(optimizers: list[Optimizer]) -> dict[Tensor, Tensor]:
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
        kernels.tidy(device)
    for optimizer in list(_attached):
        _optimizers.detach(optimizer)
    _attached.clear()
    for model, cast in list(_models.items()):
        _restore(model, cast)
    _models.clear()
    state.reset()


def _restore(model: nn.Module, cast: _Cast) -> None:
    for handle in cast.handles:
        handle.remove()
    uncast_forward(model)
    cast_module(model, lambda module, name: cast.dtypes.get(module, {}).get(name, torch.float32))


# -- Parameters --------------------------------------------------------------------------


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield what an optimizer steps, masters where it has them: clip these after ``scale_loss``, not the model's.

    Example:
        >>> optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
        >>> next(master_params(optimizer)).shape
        torch.Size([2])
    """
    for group in optimizer.param_groups:
        yield from group["params"]
