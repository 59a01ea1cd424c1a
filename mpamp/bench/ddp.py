"""A workload on two cards, each in a process of its own, with ``DistributedDataParallel``."""

from __future__ import annotations

import math
import pickle
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from .models import Measuring, run_workload
from .rows import Row
from .sizes import Sizes
from .timing import is_card
from .workloads import ddp_workload

__all__ = ["WORLD", "run"]

WORLD = 2


def run(sizes: Sizes, how: Measuring, budget_s: float = math.inf) -> list[Row]:
    """Measure the workload in ``WORLD`` processes, and return the rows of the first.

    On a processor all of them run on its cores.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (folder, sizes, how, budget_s), WORLD)
        rows: list[Row] = pickle.loads((Path(folder) / "rows").read_bytes())
    return rows


def _rank(rank: int, folder: str, sizes: Sizes, how: Measuring, budget_s: float) -> None:
    device = torch.device(how.device.type, rank) if is_card(how.device) else how.device
    if is_card(device):
        torch.accelerator.set_device_index(rank)
    store = f"file://{folder}/store"
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, store, timedelta(minutes=3), rank=rank, world_size=WORLD)
    try:
        mine = replace(how, device=device, agree=_AgreeWithFirst(device), parallel=_parallel)
        rows = run_workload(ddp_workload(sizes), "eager", mine, budget_s)
        if rank == 0:
            (Path(folder) / "rows").write_bytes(pickle.dumps(rows))
        dist.barrier()
    finally:
        dist.destroy_process_group()


class _AgreeWithFirst:
    """Returns to all processes what the first one says."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, number: int) -> int:
        told = torch.tensor(int(number), device=self.device)
        dist.broadcast(told, 0)
        return int(told)


def _parallel(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)
