"""A training from before amp: network_to_half, FP16_Optimizer, and masters by hand."""

import argparse

import torch
import torch.nn as nn
from apex.fp16_utils import (
    FP16_Optimizer,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
)
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--by-hand", action="store_true", help="masters without FP16_Optimizer")
parser.add_argument("--static-loss-scale", type=float, default=128.0)
parser.add_argument("--dynamic-loss-scale", action="store_true")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

torch.manual_seed(args.seed)
digits = load_digits()
images = torch.tensor(digits.images[:512], dtype=torch.float32).unsqueeze(1).cuda() / 16
labels = torch.tensor(digits.target[:512]).cuda()
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, 2, 1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(256, 32),
    nn.ReLU(),
    nn.Linear(32, 10),
).cuda()
if args.fp16:
    model = network_to_half(model)
criterion = nn.CrossEntropyLoss().cuda()
if args.fp16 and args.by_hand:
    model_params, master_params = prep_param_lists(model)
    optimizer = torch.optim.SGD(master_params, 0.05, momentum=0.9)
else:
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    if args.fp16:
        optimizer = FP16_Optimizer(
            optimizer, static_loss_scale=args.static_loss_scale, dynamic_loss_scale=args.dynamic_loss_scale
        )

for epoch in range(3):
    total = 0.0
    for batch in torch.randperm(len(labels)).split(64):
        loss = criterion(model(images[batch]).float(), labels[batch])
        if args.fp16 and args.by_hand:
            model.zero_grad()
            (loss * args.static_loss_scale).backward()
            model_grads_to_master_grads(model_params, master_params)
            for param in master_params:
                param.grad.data.mul_(1.0 / args.static_loss_scale)
            optimizer.step()
            master_params_to_model_params(model_params, master_params)
        elif args.fp16:
            optimizer.zero_grad()
            optimizer.backward(loss)
            optimizer.clip_master_grads(5.0)
            optimizer.step()
        else:
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
        total += loss.item()
    print(f"epoch {epoch} Loss {total / 8:.6f}")
