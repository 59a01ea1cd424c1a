"""Masters across processes: DistributedDataParallel sends the first rank's parameters to all, so masters go along."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

from ..patching import Patches
from ..torch_internals import SYNC_MODULE_STATES, broadcast_coalesced
from .masters import master_of, write_back

__all__ = ["is_served", "leave_data_parallel", "serve_data_parallel"]

_patches = Patches()


def serve_data_parallel() -> None:
    """Have DistributedDataParallel send masters with the parameters that they belong to; again does nothing.

    Ranks whose masters differ below the parameters' precision would drift apart.
    """
    if torch.distributed.is_available() and not is_served():
        _patches.wrap(*SYNC_MODULE_STATES, _with_masters)


def leave_data_parallel() -> None:
    """Take that back."""
    _patches.undo()


def is_served() -> bool:
    """Tell whether DistributedDataParallel sends masters."""
    return bool(_patches.names())


def _with_masters(synchronize: Any) -> Any:
    signature = inspect.signature(synchronize)

    @functools.wraps(synchronize)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        module: nn.Module = given["module"]
        masters = [(p, m) for p in module.parameters() if (m := master_of(p)) is not None]
        result = synchronize(*args, **kwargs)
        if masters:
            weights = [master.weight.detach() for _, master in masters]
            size, source = given["broadcast_bucket_size"], given["src"]
            broadcast_coalesced(given["process_group"], weights, size, source)
            write_back(masters)
        return result

    return wrapper
