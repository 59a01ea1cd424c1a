"""What several test modules of the drop-in use."""

from __future__ import annotations

import torch
from torch import nn

from mpamp.apex import amp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
LOW_MODEL = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def sgd(model, lr=0.125, momentum=0.9):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def start(level, *, model=None, make=sgd, **options):
    """Return an initialized model and optimizer."""
    model = net() if model is None else model
    options.setdefault("verbosity", 0)
    found = amp.initialize(model, make(model), opt_level=level, **options)
    settle()
    return found


def settle(scale=1024.0):
    """Put dynamic scales where the gradients of these small models fit."""
    for scaler in amp._amp_state.loss_scalers:
        if scaler.dynamic:
            scaler._loss_scale = scale


def step(model, optimizer, x, *, bad=False, **options):
    """Run one training step; ``bad`` makes its gradients overflow."""
    optimizer.zero_grad()
    loss = model(x).float().pow(2).mean()
    with amp.scale_loss(loss * (float("inf") if bad else 1.0), optimizer, **options) as scaled:
        scaled.backward()
    optimizer.step()
    return loss.item()


def data(seed=1, batch=8):
    return torch.randn(batch, 4, generator=torch.Generator().manual_seed(seed))
