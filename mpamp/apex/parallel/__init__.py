"""apex.parallel: data parallelism with apex's arguments over torch's, synchronized batch norm, and LARC."""

import torch

from .larc import LARC

if torch.distributed.is_available():
    from .batchnorm import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group
    from .distributed import DistributedDataParallel, Reducer, flat_dist_call

__all__ = [
    "DistributedDataParallel",
    "LARC",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
    "flat_dist_call",
]
