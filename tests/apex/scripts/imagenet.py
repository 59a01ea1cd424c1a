"""As apex's ImageNet example: DDP, SyncBatchNorm, FusedSGD, and amp by command line."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn

try:
    from apex import amp, optimizers
    from apex.fp16_utils import *  # noqa: F403
    from apex.multi_tensor_apply import multi_tensor_applier
    from apex.parallel import DistributedDataParallel as DDP
    from apex.parallel import convert_syncbn_model
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to run this example.")  # noqa: B904

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", type=str, default="O0")
parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
parser.add_argument("--loss-scale", type=str, default=None)
parser.add_argument("--delay-allreduce", action="store_true")
parser.add_argument("--store", type=str)
args = parser.parse_args()

dist.init_process_group("gloo", init_method="file://" + args.store, world_size=1, rank=0)
assert multi_tensor_applier.available
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
)
model = convert_syncbn_model(model)
optimizer = optimizers.FusedSGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
model, optimizer = amp.initialize(
    model,
    optimizer,
    opt_level=args.opt_level,
    keep_batchnorm_fp32=args.keep_batchnorm_fp32,
    loss_scale=args.loss_scale,
    verbosity=0,
)
model = DDP(model, delay_allreduce=args.delay_allreduce)
criterion = nn.CrossEntropyLoss()
images = torch.randn(32, 3, 6, 6, generator=torch.Generator().manual_seed(1))
target = (images.mean((1, 2, 3)) * 30).round().long().clamp(-2, 1) + 2
images += target.view(-1, 1, 1, 1)
losses = []
for _ in range(15):
    output = model(images)
    loss = criterion(output, target)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    losses.append(loss.item())
dtypes = {p.dtype for p in model.parameters()}
dist.destroy_process_group()
