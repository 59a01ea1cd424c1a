"""Masters across processes: DistributedDataParallel sends the first rank's parameters to all, so masters go along."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch
from torch import nn

from .masters import master_of

__all__ = ["serve_data_parallel"]


@functools.cache
def serve_data_parallel() -> None:
    """Have DistributedDataParallel send masters with the parameters that they belong to; done once.

    Ranks whose masters differ below the parameters' precision would drift apart.
    """
    if not torch.distributed.is_available():
        return
    module: Any = sys.modules["torch.nn.parallel.distributed"]
    module._sync_module_states = _with_masters(module._sync_module_states)


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
            dist: Any = torch.distributed
            dist._broadcast_coalesced(given["process_group"], weights, size, source)
            for parameter, master in masters:
                master.version = parameter._version
        return result

    return wrapper
