"""One of two processes: trains under DDP, FSDP1 and FSDP2 with an inf in rank 1's part, and reports as JSON.

Run by test_distributed.py, as ``python distributed_worker.py RANK STORE REPORT [DEVICE]``.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
import warnings
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from mpamp.errors import ScalerUsageError
from mpamp.scaler import GradScaler

RANK = int(sys.argv[1])
DEVICE = torch.device(sys.argv[4], RANK) if len(sys.argv) > 4 else torch.device("cpu")
ADAMS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
WAYS = ("step", "unscale", "clip")


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(DEVICE)


def ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(new_model())


def fsdp1(**options: Any) -> nn.Module:
    return FullyShardedDataParallel(new_model(), device_id=DEVICE, **options)


def fsdp2() -> nn.Module:
    model: Any = new_model()
    fully_shard(model[0])
    fully_shard(model)
    return model  # type: ignore[no-any-return]


WRAPPERS: dict[str, Callable[[], nn.Module]] = {
    "ddp": ddp,
    "fsdp1": fsdp1,
    "fsdp1, original parameters": lambda: fsdp1(use_orig_params=True),
    "fsdp2": fsdp2,
}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parts(model: nn.Module) -> list[list[float]]:
    return [local(p.detach()).flatten().tolist() for p in model.parameters()]


def spoil(model: nn.Module) -> None:
    """Put an inf into the last gradient that rank 1 holds a part of."""
    grads = [local(p.grad) for p in model.parameters() if p.grad is not None]
    next(g for g in reversed(grads) if g.numel()).view(-1)[0] = math.inf


def clip(model: Any) -> None:
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(1e3)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 1e3)


def train(wrapper: str, adam: dict[str, Any], way: str, *, is_scaled: bool) -> dict[str, Any]:
    """Train three iterations, of which the second has the inf; without a scaler, the first and third."""
    model = WRAPPERS[wrapper]()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, **adam)
    group = dist.group.WORLD if wrapper.startswith("fsdp1") else None
    scaler = GradScaler(DEVICE.type, init_scale=8.0, enabled=is_scaled, process_group=group)
    skipped, scales, unchanged = [], [], []
    for iteration in range(3) if is_scaled else (0, 2):
        torch.manual_seed(iteration + 10 * RANK)
        optimizer.zero_grad()
        loss = model(torch.randn(3, 4, device=DEVICE)).square().mean()
        is_bad = iteration == 1 and RANK == 1
        scaler.scale(loss * math.inf if is_bad and wrapper == "ddp" else loss).backward()
        if is_bad and wrapper != "ddp":
            spoil(model)
        before = parts(model)
        if way != "step":
            scaler.unscale_(optimizer)
        if way == "clip":
            clip(model)
        scaler.step(optimizer)
        scaler.update()
        skipped.append(scaler.last_step_skipped(optimizer))
        scales.append(scaler.get_scale())
        unchanged.append(before == parts(model))
    return {"skipped": skipped, "scales": scales, "unchanged": unchanged, "parts": parts(model)}


def both(wrapper: str, adam: str, way: str) -> dict[str, Any]:
    found = train(wrapper, ADAMS[adam], way, is_scaled=True)
    plain = train(wrapper, ADAMS[adam], way, is_scaled=False)
    pairs = zip(chain.from_iterable(found.pop("parts")), chain.from_iterable(plain["parts"]), strict=True)
    return {**found, "distance": max((abs(a - b) for a, b in pairs), default=0.0)}


def late(wrapper: str, zeroes: bool | None) -> str:
    """Train with a backward pass after ``unscale_``; say whether that gives what training without a scaler gives."""
    found = []
    for enabled in (True, False):
        model = WRAPPERS[wrapper]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        group = dist.group.WORLD if enabled and "fsdp1" in wrapper else None
        scaler = GradScaler(DEVICE.type, init_scale=8.0, enabled=enabled, process_group=group)
        x = torch.full((2, 4), RANK + 1.0, device=DEVICE)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            if zeroes is not None:
                optimizer.zero_grad(set_to_none=zeroes)
            scaler.scale(model(x).mean()).backward()
            try:
                scaler.step(optimizer)
            except ScalerUsageError:
                return "refused"
            scaler.update()
        found.append(parts(model))
    return "equal" if found[0] == found[1] else f"differ: {found}"


def parameter(grad: torch.Tensor) -> nn.Parameter:
    param = nn.Parameter(torch.zeros_like(grad))
    param.grad = grad
    return param


def outcome(params: list[nn.Parameter], *, group: Any = None, **options: Any) -> dict[str, Any]:
    """Unscale and step once with gradients as they are given."""
    # torch has no fused SGD for DTensors.
    make = torch.optim.Adam if options.get("fused") else torch.optim.SGD
    optimizer = make(params, lr=1.0, **options)
    scaler = GradScaler(DEVICE.type, init_scale=8.0, process_group=group)
    scaler.scale(torch.ones((), device=DEVICE))
    scaler.step(optimizer)
    scaler.update()
    values = [abs(local(p.detach())).sum().item() for p in params]
    return {"skipped": scaler.last_step_skipped(optimizer), "scale": scaler.get_scale(), "values": values}


def sharded(mesh: Any, *, bad: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    grad = distribute_tensor(torch.full((4,), 8.0, dtype=dtype, device=DEVICE), mesh, [Shard(0)])
    if bad and RANK == 1:
        grad.to_local()[0] = math.inf
    return grad


def mixtures() -> dict[str, Any]:
    mesh = init_device_mesh(DEVICE.type, (2,))
    plain = torch.full((2,), 8.0, device=DEVICE)
    replicated = distribute_tensor(torch.full((2,), 8.0, device=DEVICE), mesh, [Replicate()])
    none = nn.Parameter(torch.zeros(2, device=DEVICE))
    bad_plain = plain * (math.inf if RANK == 1 else 1.0)
    found: dict[str, Any] = {}
    for name, kind in (("", {"foreach": False}), (", fused", {"fused": True})):
        # torch's fused kernels take DTensors or plain tensors, not both.
        if not name:
            found["plain and sharded, good"] = outcome([parameter(plain.clone()), parameter(sharded(mesh))], **kind)
            found["plain and bad sharded"] = outcome(
                [parameter(plain.clone()), parameter(sharded(mesh, bad=True))], **kind
            )
            found["bad plain and sharded"] = outcome([parameter(bad_plain.clone()), parameter(sharded(mesh))], **kind)
        found[f"replicated before bad sharded{name}"] = outcome(
            [parameter(replicated.clone()), parameter(sharded(mesh, bad=True))], **kind
        )
        group = dist.group.WORLD
        part = parameter(bad_plain.clone()) if RANK == 1 else none
        found[f"group, one rank without gradients{name}"] = outcome([part], group=group, **kind)
        found[f"group, bad on both{name}"] = outcome([parameter(plain * math.inf)], group=group, **kind)
    found["complex sharded"] = outcome([parameter(sharded(mesh, dtype=torch.complex64))], foreach=False)
    found["complex bad sharded"] = outcome([parameter(sharded(mesh, bad=True, dtype=torch.complex64))], foreach=False)
    return found


def without_kernels() -> dict[str, Any]:
    from mpamp.scaler import kernels

    real, kernels.has_kernel = kernels.has_kernel, lambda device_type, op: False
    mesh = init_device_mesh(DEVICE.type, (2,))
    try:
        return {
            "ordinary ops, sharded": outcome([parameter(sharded(mesh))], foreach=False),
            "ordinary ops, bad sharded": outcome([parameter(sharded(mesh, bad=True))], foreach=False),
        }
    finally:
        kernels.has_kernel = real


def report_names_without_a_collective() -> str:
    """Let rank 1 alone look for its bad gradients: a collective would hang."""
    from mpamp.scaler.gradients import has_non_finite, name_gradients

    mesh = init_device_mesh(DEVICE.type, (2,))
    optimizer = torch.optim.SGD([("weight", parameter(sharded(mesh, bad=True)))], lr=1.0)
    return name_gradients(optimizer, has_non_finite) if RANK == 1 else ""


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    backend = "gloo" if DEVICE.type == "cpu" else "nccl"
    if backend == "nccl":
        torch.accelerator.set_device_index(RANK)
    dist.init_process_group(backend, store=dist.FileStore(sys.argv[2], 2), rank=RANK, world_size=2)
    found: dict[str, Any] = {}
    try:
        for wrapper in WRAPPERS:
            for adam in ADAMS:
                for way in WAYS:
                    found[f"{wrapper}/{adam}/{way}"] = both(wrapper, adam, way)
        found["late"] = {f"{w}/{z}": late(w, z) for w in WRAPPERS for z in (None, True, False)}
        found.update(mixtures())
        found.update(without_kernels())
        found["names"] = report_names_without_a_collective()
    except BaseException:
        found["error"] = traceback.format_exc()
    with open(sys.argv[3], "w", encoding="utf-8") as file:
        json.dump(found, file)
    if "error" not in found:
        dist.barrier()  # the other may still be connecting to this one
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
