"""A timm model with timm's NativeScaler and an autocast of torch's, as its train.py has them."""

import argparse
from contextlib import suppress
from functools import partial

import timm
import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from timm.optim import create_optimizer_v2
from timm.utils import AverageMeter, NativeScaler, random_seed

parser = argparse.ArgumentParser()
parser.add_argument("--amp", action="store_true")
parser.add_argument("--clip-grad", type=float, default=5.0)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--device", default="cuda")
args = parser.parse_args()

device = torch.device(args.device)
if device.type == "cuda":
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
random_seed(args.seed, 0)
model = timm.create_model(
    "vit_tiny_patch16_224", img_size=8, patch_size=4, embed_dim=32, depth=2, num_heads=2, in_chans=1, num_classes=10
).to(device=device)
optimizer = create_optimizer_v2(model, opt="adamw", lr=3e-3, weight_decay=0.01)
amp_autocast, loss_scaler = suppress, None
if args.amp:
    amp_autocast = partial(torch.autocast, device_type=device.type, dtype=torch.float16)
    loss_scaler = NativeScaler(device=device.type)
digits = load_digits()
images = torch.tensor(digits.images[:512], dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target[:512])
criterion = nn.CrossEntropyLoss().to(device=device)
model.train()
for epoch in range(4):
    losses = AverageMeter()
    for batch in torch.randperm(len(labels)).split(64):
        input, target = images[batch].to(device), labels[batch].to(device)
        with amp_autocast():
            loss = criterion(model(input), target)
        optimizer.zero_grad()
        if loss_scaler is not None:
            loss_scaler(loss, optimizer, clip_grad=args.clip_grad, parameters=model.parameters())
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        losses.update(loss.item(), input.size(0))
    print(f"Train: {epoch} Loss {losses.avg:.6f}")
