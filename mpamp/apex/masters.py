"""Master weights: the float32 values of lower-precision parameters, and keeping the two in step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["LOW", "Master", "adopt", "follow_state_dicts", "master_of"]

LOW = frozenset({torch.float16, torch.bfloat16})


class Master:
    """A parameter's float32 values, and the version of the parameter that they were last the same as."""

    __slots__ = ("loaded", "version", "weight")

    def __init__(self, model: Tensor, values: Tensor | None = None) -> None:
        self.weight = (model if values is None else values).detach().clone().float().requires_grad_(True)
        self.version = model._version
        self.loaded: Tensor | None = None
        """What a state dict that is being loaded has for it."""
        _masters[model] = self


_masters: Any = WeakTensorKeyDictionary()


def master_of(model: Tensor) -> Master | None:
    """Return a parameter's master, or None if it has none."""
    found: Master | None = _masters.get(model)
    return found


def forget(model: Tensor) -> None:
    """Drop a parameter's master."""
    _masters.pop(model, None)


@torch.no_grad()
def adopt(model: Tensor, master: Master) -> None:
    """Take over what was written into a parameter since it and its master were last the same.

    Elements that the master already rounds to stay as exact as they are there.
    """
    if model._version == master.version:
        return
    weight = master.weight
    weight.copy_(torch.where(weight.to(model.dtype) == model, weight, model.to(weight.dtype)))
    master.version = model._version


@torch.no_grad()
def write_back(pairs: list[tuple[Tensor, Master]]) -> None:
    """Copy masters into their parameters: float32 -> the parameter's dtype."""
    if pairs:
        torch._foreach_copy_([model for model, _ in pairs], [master.weight for _, master in pairs])
    for model, master in pairs:
        master.version = model._version


# -- State dicts -------------------------------------------------------------------------------------


def follow_state_dicts(model: nn.Module) -> list[Any]:
    """Have a model's state dicts hold float32, with masters' own values, and loading one set the masters.

    Returns:
        The handles that take it back.
    """
    handles: list[Any] = []
    for module in model.modules():
        handles.append(module.register_state_dict_post_hook(_widen))
        handles.append(module.register_load_state_dict_pre_hook(_see_loaded))
        handles.append(module.register_load_state_dict_post_hook(_take_loaded))
    return handles


def _widen(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for name in (*module._parameters, *module._buffers):
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor) and value.dtype in LOW:
            parameter = module._parameters.get(name)
            master = None if parameter is None else master_of(parameter)
            if master is None or parameter is None:
                state_dict[prefix + name] = value.float()
            else:
                adopt(parameter, master)
                state_dict[prefix + name] = master.weight.detach().clone()


def _see_loaded(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module._parameters.items():
        master = None if parameter is None else master_of(parameter)
        if master is not None:
            master.loaded = state_dict.get(prefix + name)


@torch.no_grad()
def _take_loaded(module: nn.Module, incompatible_keys: Any) -> None:
    for parameter in module._parameters.values():
        master = None if parameter is None else master_of(parameter)
        if master is None or parameter is None or parameter._version == master.version:
            continue
        loaded, master.loaded = master.loaded, None
        if isinstance(loaded, Tensor) and loaded.shape == parameter.shape:
            exact = loaded.to(device=parameter.device, dtype=torch.float32)
            if torch.equal(exact.to(parameter.dtype), parameter):
                master.weight.copy_(exact)
                master.version = parameter._version
                continue
        adopt(parameter, master)
