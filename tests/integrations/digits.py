"""What the frameworks are to do: digits, a small model, and the loop that a user would write without a framework."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import mpamp

__all__ = ["BATCH", "batches", "digits", "loader", "loss_of", "make_model", "train_by_hand", "weights_of"]

BATCH = 64


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """Return 512 images, float32 in [0, 1] of shape [512, 64], and their labels, int64."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images[:512] / 16, dtype=torch.float32), torch.tensor(labels[:512])


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the first batches of ``loader``."""
    images, labels = digits()
    for start in range(0, count * BATCH, BATCH):
        yield images[start : start + BATCH], labels[start : start + BATCH]


def loader(count: int) -> torch.utils.data.DataLoader[Any]:
    """Return a loader of so many batches, in order."""
    images, labels = digits()
    dataset = torch.utils.data.TensorDataset(images[: count * BATCH], labels[: count * BATCH])
    return torch.utils.data.DataLoader(dataset, batch_size=BATCH)


def make_model(seed: int = 0) -> nn.Sequential:
    """Return a model of two linear layers: four parameters, each of which a region casts."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def train_by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dtype: torch.dtype,
    steps: int,
    *,
    scaler: mpamp.GradScaler | None = None,
    clip: Callable[[Any], object] | None = None,
    every: int = 1,
    compute_loss: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor] = loss_of,
    **region: Any,
) -> None:
    """Train as a user does without a framework; a batch's share of the loss is a part of ``every``."""
    scaler = mpamp.GradScaler("cpu", enabled=False) if scaler is None else scaler
    for number, batch in enumerate(batches(steps * every), start=1):
        with mpamp.autocast("cpu", dtype, **region):
            loss = compute_loss(model, batch)
        scaler.scale(loss / every).backward()
        if number % every:
            continue
        if clip is not None:
            scaler.unscale_(optimizer)
            clip(model.parameters())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
