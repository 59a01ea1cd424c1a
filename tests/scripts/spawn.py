"""Two processes by mp.spawn, each with apex's amp and torch's DDP."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from apex import amp
from torch.nn.parallel import DistributedDataParallel


def main_worker(gpu, ngpus_per_node, args):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ["MASTER_PORT"] = str(args.port)
    torch.cuda.set_device(gpu % torch.cuda.device_count())
    dist.init_process_group(args.dist_backend, world_size=ngpus_per_node, rank=gpu)
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)).cuda(gpu % torch.cuda.device_count())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    model = DistributedDataParallel(model, device_ids=[gpu % torch.cuda.device_count()])
    data = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))[gpu::ngpus_per_node].cuda()
    target = (data.sum(1) > 0).long()
    for epoch in range(4):
        for x, y in zip(data.split(32), target.split(32), strict=True):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        dist.all_reduce(loss)
        if gpu == 0:
            print(f"epoch {epoch} Loss {loss.item() / ngpus_per_node:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--ngpus", default=2, type=int)
    parser.add_argument("--dist-backend", default="nccl")
    parser.add_argument("--port", default=29531, type=int)
    parser.add_argument("--seed", default=0, type=int)
    args = parser.parse_args()
    mp.spawn(main_worker, nprocs=args.ngpus, args=(args.ngpus, args))
