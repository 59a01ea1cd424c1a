"""Device meshes and FSDP, which ask for their device by name, and DDP's check of what its model is made of."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from ..importing import after_import
from ..torch_internals import SYNC_BATCH_NORM_HANDLE
from .patches import Patches
from .refusals import refused
from .target import Target

__all__ = ["redirect_sharding"]

_FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"
_PLACES = {"cpu_offload": 3, "device_id": 9}
"""Where they are among the arguments of FSDP, the module being the first."""


def redirect_sharding(patches: Patches, target: Target) -> None:
    """Have meshes, and so DTensors, and FSDP of an absent device be of the present one."""
    if not torch.distributed.is_available():
        return
    from torch.distributed.device_mesh import DeviceMesh

    patches.wrap(DeviceMesh, "__init__", lambda original: _of_type(original, target))
    if not target.is_accelerator:
        # Of one process the layer runs here; of several it says what to use when it is called.
        patches.wrap(
            torch.distributed, "split_group", lambda _: refused("torch.distributed.split_group", target.device)
        )
        patches.wrap(*SYNC_BATCH_NORM_HANDLE, lambda _: lambda self, module: None)

    def shard() -> None:
        if patches:  # FSDP is much to import, and may be imported after all is over
            owner = importlib.import_module(_FSDP).FullyShardedDataParallel
            patches.wrap(owner, "__init__", lambda original: _on_device(original, target))

    after_import(_FSDP, shard)


def _of_type(original: Callable[..., Any], target: Target) -> Callable[..., Any]:
    def __init__(self: Any, device_type: Any, *args: Any, **kwargs: Any) -> None:
        original(self, target.present_type(device_type), *args, **kwargs)

    return __init__


def _on_device(original: Callable[..., Any], target: Target) -> Callable[..., Any]:
    changes: dict[str, Callable[[Any], Any]] = {"device_id": target.present}
    if not target.is_accelerator:  # a processor must be asked for, and parameters needn't be moved to it
        changes = {"device_id": lambda _: target.device, "cpu_offload": lambda _: None}

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = list(args)
        for name, change in changes.items():
            if len(given) > _PLACES[name]:
                given[_PLACES[name]] = change(given[_PLACES[name]])
            else:
                kwargs[name] = change(kwargs.get(name))
        original(self, *given, **kwargs)

    return __init__
