"""One of two processes: collectives that write into a weight, or into what shares its memory, and uses around them.

Run by test_collectives.py, as ``python collectives_worker.py RANK STORE REPORT``.
"""

from __future__ import annotations

import copy
import json
import sys
import time
import traceback
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import mpamp

Tensor = torch.Tensor
BRAIN = torch.bfloat16
SIDE = 4
RANK, STORE, REPORT = int(sys.argv[1]), sys.argv[2], sys.argv[3]
OTHER = 1 - RANK
_functional: Any = torch.ops._c10d_functional


def filled(value: float) -> Tensor:
    return torch.full((SIDE, SIDE), float(value))


def half(value: float) -> Tensor:
    return torch.full((SIDE // 2, SIDE), float(value))


def group() -> Any:
    return dist.group.WORLD


def name() -> str:
    return str(group().group_name)


def point_to_point(weight: Tensor) -> None:
    if RANK:
        dist.send(filled(7), 0)
        dist.recv(weight, 0)
    else:
        dist.recv(weight, 1)
        dist.send(filled(9), 1)


def batched(weight: Tensor) -> None:
    sent = filled(5 + RANK)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, OTHER), dist.P2POp(dist.irecv, weight, OTHER)]):
        work.wait()


def in_one(weight: Tensor) -> None:
    with dist._coalescing_manager(group()):
        dist.all_reduce(weight)


COLLECTIVES: dict[str, Callable[[Tensor], object]] = {
    "broadcast": lambda w: dist.broadcast(w.fill_(5 + RANK), 0),
    "all_reduce": lambda w: dist.all_reduce(w),
    "all_reduce product": lambda w: dist.all_reduce(w.add_(1), dist.ReduceOp.PRODUCT),
    "reduce": lambda w: [dist.reduce(w, rank) for rank in range(2)],
    "all_gather": lambda w: dist.all_gather([w, filled(0)], filled(5 + RANK)),
    "all_gather of parts": lambda w: dist.all_gather(list(w.chunk(2)), half(5 + RANK)),
    "all_gather_into_tensor": lambda w: dist.all_gather_into_tensor(w, half(5 + RANK)),
    "reduce_scatter": lambda w: dist.reduce_scatter(w, [filled(5), filled(6)]),
    "reduce_scatter_tensor": lambda w: dist.reduce_scatter_tensor(w, torch.cat([filled(5), filled(6)])),
    "scatter": lambda w: dist.scatter(w, [filled(5), filled(6)] if RANK == 0 else None),
    "gather": lambda w: [dist.gather(filled(6), [w, filled(0)] if r == RANK else None, r) for r in range(2)],
    "all_to_all_single": lambda w: dist.all_to_all_single(w, filled(5 + RANK)),
    "send and recv": point_to_point,
    "recv from any": lambda w: (
        [dist.recv(w), dist.send(filled(7), 0)] if RANK else [dist.send(filled(6), 1), dist.recv(w)]
    ),
    "batch_isend_irecv": batched,
    "broadcast_coalesced": lambda w: dist._broadcast_coalesced(group(), [w.fill_(5 + RANK)], 1024, 0),  # type: ignore[attr-defined]
    "all_reduce_coalesced": lambda w: dist.all_reduce_coalesced([w]),
    "coalescing manager": in_one,
    "group's broadcast": lambda w: group().broadcast(w.fill_(5 + RANK), 0).wait(),
    "group's allreduce": lambda w: group().allreduce([w]).wait(),
    "functional all_reduce": lambda w: w.copy_(functional_collectives.all_reduce(w, "sum", group())),
    "functional all_reduce_": lambda w: _functional.wait_tensor(_functional.all_reduce_(w, "sum", name())),
    "functional broadcast_": lambda w: _functional.wait_tensor(_functional.broadcast_(w.fill_(5 + RANK), 0, name())),
    "functional all_reduce_coalesced_": lambda w: [
        _functional.wait_tensor(t) for t in _functional.all_reduce_coalesced_([w], "sum", name())
    ],
    "functional all_gather out": lambda w: _functional.wait_tensor(
        _functional.all_gather_into_tensor_out(half(5 + RANK), 2, name(), out=w)
    ),
    "functional reduce_scatter out": lambda w: _functional.wait_tensor(
        _functional.reduce_scatter_tensor_out(torch.cat([filled(5), filled(6)]), "sum", 2, name(), out=w)
    ),
    "functional all_gather inplace": lambda w: functional_collectives.all_gather_tensor_inplace(
        w, half(5 + RANK), group()
    ),
    "waited for": lambda w: _wait(dist.all_reduce(w, async_op=True)),
}
MANY = ("broadcast", "all_gather_into_tensor", "send and recv", "functional all_reduce_")
"""Those that are given each kind of alias; the others a few."""
LATER: dict[str, Callable[[Tensor], Any]] = {
    "broadcast": lambda w: dist.broadcast(w, 0, async_op=True),
    "all_reduce": lambda w: dist.all_reduce(w, async_op=True),
    "all_gather_into_tensor": lambda w: dist.all_gather_into_tensor(w, half(5 + RANK), async_op=True),
    "reduce_scatter_tensor": lambda w: dist.reduce_scatter_tensor(w, torch.cat([filled(5), filled(6)]), async_op=True),
    "irecv": lambda w: [dist.isend(filled(6), OTHER), dist.irecv(w, OTHER)],
    "functional all_reduce_": lambda w: _functional.all_reduce_(w, "sum", name()),
}


def _wait(work: Any) -> None:
    for each in work if isinstance(work, list) else [work]:
        _functional.wait_tensor(each) if isinstance(each, Tensor) else each.wait()


TARGETS: dict[str, Callable[[Tensor], Tensor]] = {
    "weight": lambda w: w,
    "data": lambda w: w.data,
    "detach": lambda w: w.detach(),
    "view": lambda w: w.view(SIDE, SIDE),
    "view of data": lambda w: w.data[:],
}


class Uses:
    """Uses of a weight in one region, or in one each; each tells whether it was of what the weight holds."""

    def __init__(self, persistent: bool) -> None:
        self.persistent = persistent

    def is_right(self, weight: Tensor) -> bool:
        x = torch.eye(SIDE)
        with torch.no_grad(), mpamp.autocast("cpu", BRAIN, persistent_cache=self.persistent):
            return torch.equal(functional.linear(x, weight).float(), weight.detach().T.to(BRAIN).float())


def _comes(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def around(write: Callable[[Tensor], object], target: str, persistent: bool, requires_grad: bool) -> bool:
    """Tell whether uses before and after a collective are right, and the collective wrote."""
    weight = nn.Parameter(filled(RANK + 1), requires_grad)
    uses = Uses(persistent)
    with mpamp.autocast("cpu", BRAIN, persistent_cache=persistent):
        for _ in range(2):
            right = [uses.is_right(weight)]
            before = weight.detach().clone()
            with torch.no_grad():
                write(TARGETS[target](weight))
            right.append(uses.is_right(weight))
            dist.barrier()
    return all(right) and not (torch.equal(before, weight) and torch.equal(weight, filled(RANK + 1)))


def meanwhile(case: str, begin: Callable[[Tensor], Any], target: str, persistent: bool) -> bool:
    """Tell whether a use after a collective's end is right, if another was between its begin and its end."""
    weight = nn.Parameter(filled(RANK + 1), requires_grad=False)
    uses, store = Uses(persistent), dist.distributed_c10d._get_default_store()
    with torch.no_grad(), mpamp.autocast("cpu", BRAIN, persistent_cache=persistent):
        uses.is_right(weight)
        if RANK == 0:
            store.wait([case])  # the other one begins, and uses, before this one takes part
        work = begin(TARGETS[target](weight))
        uses.is_right(weight)  # of what it may be, but that isn't kept
        store.set(case, "used")
        _wait(work)
        dist.barrier()
        return uses.is_right(weight)


def guarded(work: Callable[..., Any], *args: Any) -> Any:
    try:
        return work(*args)
    except Exception:
        return traceback.format_exc()


# -- What torch is made of -------------------------------------------------------------------------------


def new_model() -> nn.Module:
    torch.manual_seed(RANK)  # so that the ranks differ until one sends
    return nn.Sequential(nn.Linear(SIDE, SIDE, bias=False), nn.Linear(SIDE, SIDE, bias=False))


def are_right(model: nn.Module, x: Tensor) -> bool:
    """Tell whether a use of each weight is of what the weight holds."""
    low = copy.deepcopy(model).to(BRAIN)
    with torch.no_grad(), mpamp.autocast("cpu", BRAIN, persistent_cache=True):
        return torch.equal(model(x), low(x.to(BRAIN)))


def ddp(model: nn.Module) -> None:
    DistributedDataParallel(model)


def averaging(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # others aren't averaged
    averagers.PeriodicModelAverager(period=1).average_parameters(list(model.parameters()))


def zero(model: nn.Module) -> None:
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, RANK + 1)
    optimizer.step()


WRAPPERS: dict[str, Callable[[nn.Module], None]] = {"DDP": ddp, "an average of models": averaging, "ZeRO": zero}


def wrapped(write: Callable[[nn.Module], None]) -> bool:
    model, x = new_model(), torch.eye(SIDE)
    right = [are_right(model, x)]
    write(model)
    return all([*right, are_right(model, x)])


def sharded() -> bool:
    """Tell whether FSDP2's parameters are what its shards hold, before and after a write into these."""
    model: Any = new_model()
    mesh = init_device_mesh("cpu", (2,))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    x, right = torch.eye(SIDE), []
    for _ in range(2):
        whole = [p.full_tensor().detach().to(BRAIN) for p in model.parameters()]
        with torch.no_grad(), mpamp.autocast("cpu", BRAIN, persistent_cache=True):
            right += [torch.equal(model(x), functional.linear(functional.linear(x.to(BRAIN), whole[0]), whole[1]))] * 2
            for parameter in model.parameters():
                parameter.mul_(0.5)
    return all(right)


def is_over(persistent: bool) -> bool:
    """Tell whether a weight that was sent is cast once from then on, and goes when it is dropped."""
    weight = nn.Parameter(filled(RANK + 1), requires_grad=False)
    uses = Uses(persistent)
    with torch.no_grad(), mpamp.autocast("cpu", BRAIN, persistent_cache=persistent):
        uses.is_right(weight)
        dist.broadcast(weight, 0)
        _wait(dist.all_reduce(weight, async_op=True))
        uses.is_right(weight)
        casts = mpamp.cache_info().casts
        uses.is_right(weight)
        is_kept = mpamp.cache_info().casts == casts
    memory = weakref.ref(weight)
    del weight
    return is_kept and _comes(lambda: memory() is None)  # gloo's thread lets go of it a moment after the wait


def main() -> None:
    dist.init_process_group("gloo", init_method=f"file://{STORE}", rank=RANK, world_size=2)
    report: dict[str, dict[str, Any]] = {
        "writes": {
            f"{each}, {target}, {persistent}": guarded(around, write, target, persistent, persistent)
            for each, write in COLLECTIVES.items()
            for target in (TARGETS if each in MANY else ("weight", "view of data"))
            for persistent in (False, True)
        },
        "later": {
            (case := f"{each}, {target}, {persistent}"): guarded(meanwhile, case, begin, target, persistent)
            for each, begin in LATER.items()
            for target in ("weight", "data")
            for persistent in (False, True)
        },
        "after": {str(persistent): guarded(is_over, persistent) for persistent in (False, True)},
        "wrappers": {each: guarded(wrapped, write) for each, write in WRAPPERS.items()},
    }
    report["wrappers"]["FSDP2"] = guarded(sharded)
    with open(REPORT, "w", encoding="utf-8") as file:
        json.dump(report, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
