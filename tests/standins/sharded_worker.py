"""One of two processes: trains under FSDP1 with torch's ShardedGradScaler under install(), and reports as JSON.

Run by test_sharded_scaler.py, as ``python sharded_worker.py RANK STORE REPORT``.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # before there is a process group

import mpamp

RANK = int(sys.argv[1])
BAD = {1: {1}, 2: {0, 1}}
"""The ranks with an inf, by iteration."""


def train(way: str, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    scaler: Any = ShardedGradScaler("cpu", init_scale=8.0)
    skipped, unchanged, scales = [], [], []
    for iteration in range(4):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(3, 4)).sum()).backward()
        before = [p.detach().clone() for p in model.parameters()]
        if RANK in BAD.get(iteration, ()):
            next(p.grad for p in model.parameters() if p.grad is not None).view(-1)[0] = math.inf
        if way == "unscale":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        skipped.append(scaler.last_step_skipped(optimizer))
        unchanged.append(all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
        scales.append(scaler.get_scale())
    return {"skipped": skipped, "unchanged": unchanged, "scales": scales}


if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=RANK, world_size=2)
    kinds = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    with mpamp.install():
        found = {f"{way}/{kind}": train(way, kinds[kind]) for way in ("step", "unscale") for kind in kinds}
    with open(sys.argv[3], "w") as file:
        json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()
