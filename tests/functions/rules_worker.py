"""One of two processes: trains a model with module rules under DDP and FSDP2, and reports dtypes and losses as JSON.

Run by test_distributed_rules.py, as ``python rules_worker.py RANK STORE REPORT``.
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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import mpamp

RULES = {"1": "fp32", "2": {"softmax": "fp32"}, "2.*": torch.float16, "3": False}
X = torch.linspace(-1, 1, 16).reshape(4, 4)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.seen = nn.Linear(4, 4), list[str]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.lin(x)
        out = low.softmax(-1)
        self.seen += [str(x.dtype), str(low.dtype), str(out.dtype)]
        return out


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Part() for _ in range(5)))


def alone() -> nn.Module:
    model = new_model()
    mpamp.module_rules(model, RULES)
    return model


def ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(alone())


def shard(module: nn.Module, **options: Any) -> Any:
    """Shard over the processor: on a machine with a card torch would move the module there."""
    return fully_shard(module, mesh=init_device_mesh("cpu", (2,)), **options)


def fsdp2(**options: Any) -> nn.Module:
    model = alone()
    for part in model:
        shard(part, **options)
    return shard(model, **options)


def fsdp2_first() -> nn.Module:
    model = new_model()
    for part in model:
        shard(part)
    shard(model)
    mpamp.module_rules(model, RULES)
    return model


WRAPPERS: dict[str, Callable[[], nn.Module]] = {
    "alone": alone,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "fsdp2, rules last": fsdp2_first,
    "fsdp2, low parameters": lambda: fsdp2(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
}


def fsdp2_factor() -> float:
    """Return by what FSDP2 multiplies gradients: torch 2.8 sums them over gloo, where it says that it averages."""
    layer = nn.Linear(1, 1, bias=False)
    fully_shard(layer)
    layer(torch.ones(1, 1)).sum().backward()
    grad: Any = layer.weight.grad
    return float(grad.full_tensor())


def train(make: Callable[[], nn.Module], lr: float) -> dict[str, Any]:
    model = make()
    parts = [m for m in model.modules() if isinstance(m, Part)]
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for _ in range(2):
        for part in parts:
            part.seen.clear()
        with mpamp.autocast("cpu", dtype=torch.bfloat16):
            loss = (model(X).float() * torch.arange(4.0)).sum()
        loss.backward()
        optimizer.step()
        grads = sorted({str(p.grad.dtype) for p in model.parameters() if p.grad is not None})
        optimizer.zero_grad()
        losses.append(loss.item())
    norms = [float(p.full_tensor().norm() if isinstance(p, DTensor) else p.norm()) for p in model.parameters()]
    return {"seen": [part.seen for part in parts], "losses": losses, "grads": grads, "norms": norms}


def main() -> None:
    rank, store, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    warnings.simplefilter("ignore")
    report: dict[str, Any] = {}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        factor = fsdp2_factor()
        for name, make in WRAPPERS.items():
            report[name] = train(make, 0.1 / factor if name.startswith("fsdp2") else 0.1)
    except Exception:
        report["error"] = traceback.format_exc()
    with open(path, "w", encoding="utf-8") as file:
        json.dump(report, file)
    if "error" not in report:
        dist.barrier()  # the other may still be connecting to this one
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
