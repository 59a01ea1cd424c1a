"""A training with torch.cuda.amp, as torch's own recipe has it: no apex."""

import argparse

import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.cuda.amp import GradScaler, autocast

parser = argparse.ArgumentParser()
parser.add_argument("--no-amp", action="store_true")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
use_amp = not args.no_amp

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.backends.cudnn.benchmark = True
torch.manual_seed(args.seed)
torch.cuda.manual_seed_all(args.seed)
digits = load_digits()
images = torch.tensor(digits.images[:512], dtype=torch.float32).unsqueeze(1) / 16
dataset = torch.utils.data.TensorDataset(images, torch.tensor(digits.target[:512]))
loader = torch.utils.data.DataLoader(dataset, batch_size=64, shuffle=True, pin_memory=True)
net = nn.Sequential(
    nn.Conv2d(1, 16, 3, 2, 1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(256, 32),
    nn.ReLU(),
    nn.Linear(32, 10),
).to(device)
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
scaler = GradScaler(enabled=use_amp)
criterion = nn.CrossEntropyLoss().cuda()
for epoch in range(3):
    total = torch.zeros((), device=device)
    for image, label in loader:
        image, label = image.to(device, non_blocking=True), label.to(device, non_blocking=True)
        with autocast(enabled=use_amp):
            output = net(image)
            assert output.dtype is (torch.float16 if use_amp else torch.float32)
            loss = criterion(output, label)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        total += loss.detach()
    torch.cuda.synchronize()
    print(f"epoch {epoch} Loss {total.item() / len(loader):.6f}, {torch.cuda.max_memory_allocated() / 2**20:.0f} MB")
