"""Several cards and processes: DataParallel, DDP, process groups and transfers between cards."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import comm, scatter_gather

from ..errors import RedirectError
from ..torch_internals import AVAILABLE_DEVICE_TYPE, BatchNorm
from .patches import Patches
from .refusals import refused
from .target import Target

__all__ = ["redirect_parallel"]


def redirect_parallel(patches: Patches, target: Target) -> None:
    """Have what is spread over cards run on the one device, and processes talk through what serves it."""
    if torch.distributed.is_available():
        _redirect_groups(patches, target)
        patches.wrap(torch.nn.parallel.DistributedDataParallel, "__init__", _without_cards)
    if not target.is_accelerator:
        _redirect_replicas(patches, target)
        patches.wrap(torch.nn.SyncBatchNorm, "forward", lambda original: _synchronized(original, target))


# -- Processes -----------------------------------------------------------------------------------------


def _redirect_groups(patches: Patches, target: Target) -> None:
    distributed = torch.distributed
    core: Any = torch.distributed.distributed_c10d

    def own() -> str:
        found = distributed.Backend.default_device_backend_map.get(target.device.type)
        if found is None:
            raise RedirectError(f"torch.distributed has no backend for {target.device.type!r}; name one that it has.")
        return str(found)

    def backend(name: Any) -> Any:
        """Return a backend that is here: those of absent devices become the device's own."""
        if not isinstance(name, str):
            return name
        parts = [part.rpartition(":") for part in name.lower().split(",")]
        kept = [(device, kind) for device, _, kind in parts if not device or not target.is_absent(device)]
        if any(device for device, _ in kept) or len(kept) != len(parts):
            return ",".join(f"{device}:{kind}" for device, kind in kept) or own()
        return own() if target.is_absent(_device_of(name)) else name

    def grouped(place: int) -> Callable[[Any], Any]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def function(*args: Any, **kwargs: Any) -> Any:
                if len(args) > place:
                    args = (*args[:place], backend(args[place]), *args[place + 1 :])
                if "backend" in kwargs:
                    kwargs["backend"] = backend(kwargs["backend"])
                if kwargs.get("device_id") is not None:
                    kwargs["device_id"] = target.device if target.is_accelerator else None
                return original(*args, **kwargs)

            return function

        return make

    def barrier(original: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("device_ids", None)
            return original(*args[:2], **kwargs)

        return function

    meshes: Any = importlib.import_module("torch.distributed.device_mesh")
    patches.wrap(meshes, "new_group", grouped(2))  # its own name of it: a mesh of a build for CUDA asks for NCCL
    for owner in (distributed, core):
        patches.wrap(owner, "init_process_group", grouped(0))
        patches.wrap(owner, "new_group", grouped(2))
        patches.wrap(owner, "barrier", barrier)
        for name in target.absent:
            kind = distributed.Backend.default_device_backend_map.get(name)
            patches.wrap(owner, f"is_{kind}_available", lambda _: lambda: True)


def _device_of(backend: str) -> str:
    """Return the device type that a backend is the default of; empty for one of several devices or none."""
    devices = torch.distributed.Backend.default_device_backend_map
    found = [device for device, kind in devices.items() if kind == backend.lower()]
    return found[0] if len(found) == 1 else ""


def _without_cards(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any):  # type: ignore[no-untyped-def]
        original(self, module, None, None, *args, **kwargs)

    return __init__


# -- Cards ---------------------------------------------------------------------------------------------


def _redirect_replicas(patches: Patches, target: Target) -> None:
    def data_parallel_(module: Any, inputs: Any, *args: Any, module_kwargs: Any = None, **kwargs: Any) -> Any:
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        return module(*inputs, **(module_kwargs or {}))

    module = importlib.import_module("torch.nn.parallel.data_parallel")  # the package has a function of that name
    patches.put(*AVAILABLE_DEVICE_TYPE, lambda: None)  # DataParallel then calls its module
    for owner in (torch.nn.parallel, module):
        patches.wrap(owner, "data_parallel", lambda _: data_parallel_)
        patches.wrap(owner, "replicate", lambda _: refused("torch.nn.parallel.replicate", target.device))
    patches.put(scatter_gather, "Gather", _Gather)
    transfers = _transfers(target)
    for owner in (
        comm,
        *(getattr(torch, name).comm for name in target.absent if hasattr(getattr(torch, name), "comm")),
    ):
        for name, function in transfers.items():
            patches.wrap(owner, name, lambda _, function=function: function)  # type: ignore[misc]


class _Gather:
    """Stands for torch's Function of this name, which refuses tensors of a processor."""

    @staticmethod
    def apply(device: Any, dim: int, *tensors: Any) -> Any:
        return torch.cat(tensors, dim) if tensors[0].dim() else torch.stack(tensors)


def _transfers(target: Target) -> dict[str, Any]:
    """Return ``torch.cuda.comm`` for one device: as many tensors as there were cards to be, all of them here."""

    def broadcast(tensor: Any, devices: Any = None, *, out: Any = None) -> Any:
        if out is None:
            return tuple(tensor.to(target.device) for _ in devices)
        return tuple(copy.copy_(tensor) for copy in out)

    def reduce_add(inputs: Any, destination: Any = None) -> Any:
        return torch.stack(list(inputs)).sum(0)

    def scatter(
        tensor: Any, devices: Any = None, chunk_sizes: Any = None, dim: int = 0, streams: Any = None, *, out: Any = None
    ) -> Any:
        count = len(devices if out is None else out)
        pieces = tensor.chunk(count, dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim)
        if out is None:
            return tuple(piece.to(target.device) for piece in pieces)
        return tuple(place.copy_(piece) for place, piece in zip(out, pieces, strict=True))

    def gather(tensors: Any, dim: int = 0, destination: Any = None, *, out: Any = None) -> Any:
        return torch.cat(list(tensors), dim) if out is None else torch.cat(list(tensors), dim, out=out)

    return {
        "broadcast": broadcast,
        "broadcast_coalesced": lambda tensors, devices, buffer_size=0: tuple(list(tensors) for _ in devices),
        "reduce_add": reduce_add,
        "reduce_add_coalesced": lambda inputs, destination=None, buffer_size=0: tuple(
            reduce_add(same) for same in zip(*inputs, strict=True)
        ),
        "scatter": scatter,
        "gather": gather,
    }


def _synchronized(original: Callable[..., Any], target: Target) -> Callable[..., Any]:
    """Serve ``SyncBatchNorm`` of one process, where it is batch norm: torch refuses it beside a processor."""

    def forward(self: Any, input: Any) -> Any:
        needs_others = self.training and torch.distributed.is_available() and torch.distributed.is_initialized()
        if not needs_others or not target.is_here(input):
            return original(self, input)
        if torch.distributed.get_world_size(self.process_group) == 1:
            return BatchNorm.forward(self, input)
        raise RedirectError(
            f"torch.nn.SyncBatchNorm of several processes doesn't run on {str(target.device)!r}. "
            "Use apex.parallel.convert_syncbn_model, which mpamp serves on every device."
        )

    return forward
