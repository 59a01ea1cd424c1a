"""apex.fp16_utils's functions: casting a network with its batch norm kept, and masters by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...torch_internals import flatten_dense_tensors, foreach_copy_, unflatten_dense_tensors
from ..casting import keeps_float32
from ..errors import AmpTypeError
from .loss_scaler import to_python_float

__all__ = [
    "BN_convert_float",
    "FP16Model",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]

clip_grad_norm = nn.utils.clip_grad_norm_


# -- Networks ----------------------------------------------------------------------------------------


class tofp16(nn.Module):
    """Casts its input to float16.

    Example:
        >>> tofp16()(torch.ones(1)).dtype
        torch.float16
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the input in float16."""
        return input.half()


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Cast a network's batch norm layers that have weights to float32, in place; return the network.

    Example:
        >>> BN_convert_float(nn.BatchNorm1d(2).half()).weight.dtype
        torch.float32
    """
    for layer in module.modules():
        if keeps_float32(layer):
            layer.float()
    return module


def network_to_half(network: nn.Module) -> nn.Module:
    """Cast a network to float16, batch norm apart, in place; return it behind a cast of its input.

    Example:
        >>> network_to_half(nn.Linear(2, 1))(torch.ones(1, 2)).dtype
        torch.float16
    """
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast a module's own floating parameters, gradients and buffers, not those of the modules in it.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> convert_module(layer, torch.bfloat16)
        >>> layer.bias.dtype
        torch.bfloat16
    """
    for param in module.parameters(recurse=False):
        if param.is_floating_point():
            grad, param.grad = param.grad, None
            param.data = param.data.to(dtype)
            param.grad = None if grad is None else grad.to(dtype)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point():
            module._buffers[name] = buffer.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a network's floating tensors, batch norm layers that have weights apart, in place; return the network.

    Example:
        >>> net = convert_network(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), torch.float16)
        >>> net[0].weight.dtype, net[1].weight.dtype
        (torch.float16, torch.float32)
    """
    for module in network.modules():
        if not keeps_float32(module):
            convert_module(module, dtype)
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()
    return network


class FP16Model(nn.Module):
    """A network in float16, batch norm apart, with its inputs cast.

    Args:
        network: The network, which is cast in place.

    Example:
        >>> FP16Model(nn.Linear(2, 1))(torch.ones(1, 2)).dtype
        torch.float16
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.half)

    def forward(self, *inputs: Tensor) -> Any:
        """Return the network's output for inputs cast to float16."""
        return self.network(*(value.half() for value in inputs))


# -- Masters -----------------------------------------------------------------------------------------


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Return a model's trained parameters and float32 masters of them.

    Args:
        model: The model.
        flat_master: Make one flat master of all, which then need one dtype.

    Raises:
        AmpTypeError: ``flat_master``, and the parameters have several dtypes.

    Example:
        >>> params, masters = prep_param_lists(nn.Linear(2, 1).half())
        >>> masters[0].dtype, masters[0].requires_grad
        (torch.float32, True)
    """
    params: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    if not flat_master:
        return params, [p.detach().clone().float().requires_grad_(True) for p in params]
    dtypes = {p.dtype for p in params}
    if len(dtypes) > 1:
        raise AmpTypeError(
            f"one flat master needs parameters of one dtype, got {', '.join(sorted(map(str, dtypes)))}: leave "
            "flat_master out, or use FP16_Optimizer."
        )
    flat = nn.Parameter(flatten_dense_tensors([p.detach() for p in params]).float())
    flat.grad = torch.zeros_like(flat)
    return params, [flat]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy a model's gradients into its masters': any dtype -> float32; None where the model's is None.

    Example:
        >>> p, master = torch.ones(1, dtype=torch.float16, requires_grad=True), torch.ones(1, requires_grad=True)
        >>> (p * 2).sum().backward()
        >>> model_grads_to_master_grads([p], [master])
        >>> master.grad
        tensor([2.])
    """
    if flat_master:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model_params]
        flat = flatten_dense_tensors(grads)
        master_params[0].grad = flat.to(master_params[0].dtype, copy=True)
        return
    for model, master in zip(model_params, master_params, strict=True):
        if model.grad is None:
            master.grad = None
        elif master.grad is None:
            master.grad = model.grad.detach().to(master.dtype, copy=True)
        else:
            master.grad.copy_(model.grad)


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy masters into a model: float32 -> the parameter's dtype.

    Example:
        >>> p = torch.ones(1, dtype=torch.float16, requires_grad=True)
        >>> master_params_to_model_params([p], [torch.full((1,), 3.0)])
        >>> p.item()
        3.0
    """
    masters = list(master_params)
    if flat_master:
        masters = list(unflatten_dense_tensors(masters[0].detach(), list(model_params)))
    if masters:
        foreach_copy_([p.detach() for p in model_params], [master.detach() for master in masters])
