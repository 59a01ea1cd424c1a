"""As BERT's SQuAD script of 2019: FusedAdam and FP16_Optimizer of apex.optimizers, without amp."""

import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--loss_scale", type=float, default=0)
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
parameters = [
    {"params": [p for n, p in model.named_parameters() if "bias" not in n], "weight_decay": 0.01},
    {"params": [p for n, p in model.named_parameters() if "bias" in n], "weight_decay": 0.0},
]
try:
    from apex.optimizers import FP16_Optimizer, FusedAdam
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to use fp16.")  # noqa: B904
if args.fp16:
    model.half()
optimizer = FusedAdam(parameters, lr=0.02, bias_correction=False, max_grad_norm=1.0)
if args.fp16:
    if args.loss_scale == 0:
        optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True, verbose=False)
    else:
        optimizer = FP16_Optimizer(optimizer, static_loss_scale=args.loss_scale, verbose=False)
x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
y = (x[:, 0] > 0).long()
losses, skips = [], 0
while len(losses) < 15:
    loss = nn.functional.cross_entropy(model(x.half() if args.fp16 else x).float(), y)
    if args.fp16:
        optimizer.backward(loss)
    else:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if args.fp16 and optimizer.overflow:
        skips += 1
        continue
    losses.append(loss.item())
dtypes = {p.dtype for p in model.parameters()}
