"""One of two processes: apex's data parallelism, batch norm, LARC and FP16_Optimizer; writes what it sees as JSON."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn

from mpamp.apex import amp
from mpamp.apex.fp16_utils import FP16_Optimizer, network_to_half
from mpamp.apex.optimizers import FusedSGD
from mpamp.apex.parallel import (
    LARC,
    DistributedDataParallel,
    Reducer,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
    flat_dist_call,
)

STEPS, BATCH = 12, 8
BAD = 3
"""The step whose loss overflows on the first rank."""


def net(seed, norm=True):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), *([nn.BatchNorm1d(16)] if norm else []), nn.ReLU(), nn.Linear(16, 1))


def data(step):
    """Return the joint batch of a step."""
    x = torch.randn(2 * BATCH, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


def mine(step, rank):
    return [part[rank * BATCH : (rank + 1) * BATCH] for part in data(step)]


def larc(params):
    return LARC(FusedSGD(params, lr=0.1, momentum=0.9, weight_decay=0.01), trust_coefficient=0.5)


def losses_alone(make=larc, norm=True):
    """Return the losses of float32 in one process, on joint batches."""
    model = net(0, norm)
    optimizer = make(model.parameters())
    found = []
    for step in range(STEPS):
        x, y = data(step)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        if step != BAD:
            optimizer.step()
        found.append(loss.item())
    return found


def exact(tensors):
    return [value.hex() for tensor in tensors for value in tensor.detach().double().reshape(-1).tolist()]


def mean_of_ranks(value):
    total = torch.tensor([value])
    flat_dist_call([total], dist.all_reduce)
    return total.item()


def train(level, rank, **options):
    """Train by amp, DDP, SyncBatchNorm and LARC, from another seed on each rank."""
    model = convert_syncbn_model(net(rank))
    model, optimizer = amp.initialize(model, larc(model.parameters()), opt_level=level, verbosity=0)
    for scaler in amp._amp_state.loss_scalers:
        if scaler.dynamic:
            scaler._loss_scale = 1024.0
    wrapped = DistributedDataParallel(model, **options)
    found, skipped = [], []
    for step in range(STEPS):
        x, y = mine(step, rank)
        optimizer.zero_grad()
        loss = (wrapped(x).float() - y).square().mean()
        found.append(mean_of_ranks(loss.item()))
        bad = step == BAD and rank == 0 and amp._amp_state.loss_scalers[0].dynamic
        before = exact(amp.master_params(optimizer))
        if step != BAD or amp._amp_state.loss_scalers[0].dynamic:
            with amp.scale_loss(loss * (float("inf") if bad else 1.0), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        skipped.append(exact(amp.master_params(optimizer)) == before)
    result = {"losses": found, "masters": exact(amp.master_params(optimizer)), "skipped": skipped}
    result["dtypes"] = sorted({str(p.dtype) for p in model.parameters()})
    amp.shutdown()
    return result


def by_fp16_optimizer(rank):
    """Train by fp16_utils, apex's way before amp."""
    model = network_to_half(net(rank, norm=False))
    wrapped = DistributedDataParallel(model, delay_allreduce=True)
    optimizer = FP16_Optimizer(
        larc(model.parameters()), dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 1024.0}, verbose=False
    )
    found = []
    for step in range(STEPS):
        x, y = mine(step, rank)
        optimizer.zero_grad()
        loss = (wrapped(x).float() - y).square().mean()
        found.append(mean_of_ranks(loss.item()))
        optimizer.backward(loss * (float("inf") if step == BAD and rank == 0 else 1.0))
        optimizer.step()
    masters = [p for group in optimizer.fp32_from_fp16_groups for p in group]
    return {"losses": found, "masters": exact(masters), "scale": optimizer.loss_scale}


def batch_norm(rank):
    """Return how far layers are from BatchNorm over the joint batch, at most, by case."""
    found = {}
    cases = {
        "plain": ((6, 3), {}),
        "images": ((6, 3, 2, 2), {}),
        "channels last": ((6, 2, 2, 3), {"channel_last": True}),
        "average": ((6, 3, 4), {"momentum": None}),
        "relu": ((6, 3), {"fuse_relu": True}),
        "no statistics": ((6, 3), {"track_running_stats": False}),
        "no weights": ((6, 3), {"affine": False}),
    }
    for name, (shape, options) in cases.items():
        found[name] = _far(rank, shape, options)
    return found


def _far(rank, shape, options):
    last = options.get("channel_last", False)
    layer = SyncBatchNorm(3, **options).double()
    common = {key: value for key, value in options.items() if key not in ("channel_last", "fuse_relu")}
    joint = nn.BatchNorm1d(3, **common).double()
    if layer.affine:
        with torch.no_grad():
            for one in (layer, joint):
                one.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
                one.bias.copy_(torch.tensor([-1.0, 0.0, 1.0]))
    place = slice(0, 2) if rank == 0 else slice(2, 6)  # not the same number on each
    far = []
    for number in range(2):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(number)).double() * 3 + 5
        weight = torch.arange(x.numel(), dtype=torch.float64).view(shape).sin()
        own, whole = x[place].clone().requires_grad_(True), x.clone().requires_grad_(True)
        z = torch.ones_like(x)
        out = layer(own, z=z[place])
        flat = (whole.movedim(-1, 1) if last else whole).reshape(shape[0], 3, -1)
        wide = joint(flat)
        wide = (wide.view(shape[0], 3, *shape[1:-1]).movedim(1, -1) if last else wide.view(shape)) + z
        wide = torch.relu(wide) if options.get("fuse_relu") else wide
        (out * weight[place]).sum().backward()
        (wide * weight).sum().backward()
        far += [out - wide[place], own.grad - whole.grad[place]]
    if layer.affine:
        grads = [layer.weight.grad, layer.bias.grad]
        for grad in grads:
            dist.all_reduce(grad)
        far += [grads[0] - joint.weight.grad, grads[1] - joint.bias.grad]
    if layer.track_running_stats:
        far += [layer.running_mean - joint.running_mean, layer.running_var - joint.running_var]
        layer.eval()
        joint.eval()
        assert int(layer.num_batches_tracked) == 2
    return max(one.detach().abs().max().item() for one in far)


def half_batch_norm(rank):
    layer = SyncBatchNorm(3)
    out = layer(torch.full((2, 3), 4.0 if rank else 2.0, dtype=torch.bfloat16))
    return {"dtype": str(out.dtype), "values": out[0].tolist(), "mean": layer.running_mean.tolist()}


def gradient(rank, **options):
    """Return one parameter's gradient after a backward pass of 1 on the first rank and 3 on the second."""
    model = nn.Linear(1, 1, bias=False)
    wrapped = DistributedDataParallel(model, **options)
    (wrapped(torch.ones(1, 1)) * (1.0 + 2 * rank)).sum().backward()
    return model.weight.grad.item()


def arguments(rank):
    found = {
        "default": gradient(rank),
        "small buckets": gradient(rank, message_size=1),
        "sum": gradient(rank, gradient_average=False),
        "predivided": gradient(rank, gradient_predivide_factor=4.0),
        "split factor": gradient(rank, gradient_average_split_factor=4.0, gradient_average=False),
        "float32": gradient(rank, allreduce_always_fp32=True),
        "ignored": gradient(rank, num_allreduce_streams=2, prof=True, retain_allreduce_buffers=True),
    }
    for name in ("default", "sum", "predivided", "float32"):
        options = {"sum": {"gradient_average": False}, "predivided": {"gradient_predivide_factor": 4.0}}.get(name, {})
        options["allreduce_always_fp32"] = name == "float32"
        found[f"delayed {name}"] = gradient(rank, delay_allreduce=True, **options)
    group = create_syncbn_process_group(1)
    found["alone"] = gradient(rank, allreduce_communicators=([group], [None]))
    return found


def accumulation(rank, **options):
    """Return gradients with reduction off, then on, then of a part called past the wrapper."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    wrapped = DistributedDataParallel(model, **options)
    found = []
    wrapped.disable_allreduce()
    for number in range(2):
        (wrapped(torch.ones(1, 1)) * (1.0 + 2 * rank)).sum().backward()
        found.append(model[0].weight.grad.item())
        if number == 0:
            wrapped.enable_allreduce()
    return found


def delayed(rank):
    """Return gradients of a model that is called in parts and twice, and has a parameter that isn't used."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1), "unused": nn.Linear(1, 1)})
    wrapped = DistributedDataParallel(model, delay_allreduce=True)
    x = torch.full((1, 1), 1.0 + rank)
    (wrapped.module["a"](x) + wrapped.module["a"](2 * x) + wrapped.module["b"](x)).sum().backward()
    return [model["a"].weight.grad.item(), model["b"].weight.grad.item(), model["unused"].weight.grad is None]


def reducer(rank):
    model = net(rank, norm=False)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O5", verbosity=0)
    reduce = Reducer(model)
    masters = exact(amp.master_params(optimizer))
    for p in model.parameters():
        p.grad = torch.full_like(p, 1.0 + 2 * rank)
    reduce.reduce()
    reduced = sorted({value for p in model.parameters() for value in p.grad.reshape(-1).tolist()})
    amp.shutdown()
    grads = [torch.full((2,), 1.0 + rank), torch.full((1,), 2.0 * rank, dtype=torch.float64)]
    Reducer(grads).reduce()
    sent = [torch.full((2,), float(rank + 5))]
    flat_dist_call(sent, dist.broadcast, (0,))
    return {
        "masters": masters,
        "grads": reduced,
        "list": [grad.tolist() for grad in grads],
        "sent": sent[0].tolist(),
    }


def groups():
    sizes = [create_syncbn_process_group(size) for size in (1, 2)]
    try:
        create_syncbn_process_group(3)
    except AssertionError as error:
        refused = str(error)
    return {"sizes": [dist.get_world_size(group) for group in sizes], "refused": refused}


def main() -> None:
    rank, store, file = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", world_size=2, rank=rank)
    report = {
        "alone": losses_alone(),
        "alone without norm": losses_alone(norm=False),
        "trained": {
            name: train(level, rank, **options)
            for name, level, options in (
                ("O0", "O0", {}),
                ("O2", "O2", {}),
                ("O2 delayed", "O2", {"delay_allreduce": True}),
                ("O2 float32", "O2", {"allreduce_always_fp32": True, "gradient_predivide_factor": 2.0}),
                ("O4", "O4", {}),
                ("O5", "O5", {}),
            )
        },
        "fp16": by_fp16_optimizer(rank),
        "batch norm": batch_norm(rank),
        "half batch norm": half_batch_norm(rank),
        "arguments": arguments(rank),
        "accumulation": [accumulation(rank), accumulation(rank, delay_allreduce=True)],
        "delayed": delayed(rank),
        "reducer": reducer(rank),
        "groups": groups(),
    }
    with open(file, "w", encoding="utf-8") as out:
        json.dump(report, out)
    dist.barrier()  # the other may still be connecting to this one
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
