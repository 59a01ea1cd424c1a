"""One of two processes: traces training under DDP and FSDP2, and looks for an overflow that only rank 1 has.

Run by test_ranks.py, as ``python ranks_worker.py RANK STORE REPORT``.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mpamp

BRAIN, HALF = torch.bfloat16, torch.float16


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Sequential(nn.Linear(64, 64)))


def fsdp2() -> nn.Module:
    model = new_model()
    mesh = init_device_mesh("cpu", (2,))  # on a machine with a card torch would move the model there
    fully_shard(model[2], mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]


WRAPPERS: dict[str, Callable[[], nn.Module]] = {
    "alone": new_model,
    "ddp": lambda: DistributedDataParallel(new_model()),
    "fsdp2": fsdp2,
}


def trace(make: Callable[[], nn.Module]) -> dict[str, Any]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpamp.trace() as seen:
        for _ in range(2):
            with mpamp.autocast("cpu", BRAIN):
                loss = model(torch.ones(32, 64)).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    uses = [[use.module, use.calls, use.casts, use.kept_used] for use in seen.uses if use.op == "aten::linear"]
    return {"uses": uses, "findings": [str(finding) for finding in seen.findings]}


def overflow(rank: int) -> dict[str, Any]:
    """Train three steps, of which the second overflows on rank 1 only; its gradients reach both."""
    model = DistributedDataParallel(new_model())
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), mpamp.GradScaler("cpu", 16.0)
    with mpamp.find_overflow(model.module, scaler=scaler, least_share=None) as finder:
        for step in range(3):
            x = torch.full((4, 64), 1e6 if step == rank == 1 else 1.0)
            with mpamp.autocast("cpu", HALF):
                loss = model(x).float().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    overflows = [[r.step, r.overflow.op if r.overflow else None, r.scale] for r in finder.reports]
    told = [str(r).splitlines()[1] for r in finder.skips if r.overflow is None]
    return {"steps": finder.steps, "overflows": overflows, "scale": scaler.get_scale(), "told": told}


def main() -> None:
    rank, store, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    warnings.simplefilter("ignore")
    report: dict[str, Any] = {}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        report = {name: trace(make) for name, make in WRAPPERS.items()}
        report["overflow"] = overflow(rank)
    except Exception:
        report["error"] = traceback.format_exc()
    with open(path, "w", encoding="utf-8") as file:
        json.dump(report, file)
    if "error" not in report:
        dist.barrier()  # the other may still be connecting to this one
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
