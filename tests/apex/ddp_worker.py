"""One of two processes: DDP after ``initialize``, from different seeds; prints what its masters are in the end."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mpamp.apex import amp
from tests.apex.training import data, net, settle, sgd


def main() -> None:
    level, store, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{store}", world_size=2, rank=rank)
    model = net(seed=rank)
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    settle()
    wrapped = DistributedDataParallel(model)
    for number in range(4):
        optimizer.zero_grad()
        loss = wrapped(data(10 * number + rank)).float().pow(2).mean()
        if number == 1 and rank == 0:
            loss = loss * float("inf")
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    total = [p.detach().double().sum().item().hex() for p in amp.master_params(optimizer)]
    sys.stdout.write(f"{total} {amp.state_dict()}\n")
    dist.barrier()  # the other may still be connecting to this one
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
