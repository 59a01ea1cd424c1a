"""The training that ``mpamp demo`` shows. Needs scikit-learn."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import sklearn.datasets
import sklearn.model_selection
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import mpamp
from mpamp.testing import WeightCastCounter

__all__ = ["Digits", "TrainingRun", "load_digits", "make_model", "train"]

_BATCH_SIZE = 64
_SEED = 0

# A scaler of mpamp's own is a drop-in for torch's; until there is one, torch's does.
_GradScaler: type[torch.amp.GradScaler] = getattr(mpamp, "GradScaler", torch.amp.GradScaler)


@dataclass(frozen=True, slots=True)
class Digits:
    """The digits on one device: images [n, 1, 8, 8] in float32 from 0 to 1, labels [n] in int64."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor

    @property
    def device(self) -> torch.device:
        """The device that all four tensors are on."""
        return self.train_images.device

    @property
    def steps_per_epoch(self) -> int:
        """The whole batches in one pass over the training images; what is left over sits the pass out."""
        return len(self.train_images) // _BATCH_SIZE


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """What one training gave.

    Attributes:
        name: What the run is called in the table and in the picture.
        losses: The training loss of every step.
        loss_scales: The loss scale of every step (dimensionless, a power of two); empty where none is used.
        accuracy: The share of the test images that are classified right, from 0 to 1.
        final_loss: The mean training loss of the last epoch.
        ms_per_step: The median time of a step in milliseconds, without the first.
        weight_casts_per_step: The casts of weights to the lower precision in the first step.
    """

    name: str
    losses: tuple[float, ...]
    loss_scales: tuple[float, ...]
    accuracy: float
    final_loss: float
    ms_per_step: float
    weight_casts_per_step: int


def load_digits(device: torch.device) -> Digits:
    """Load scikit-learn's digits and split them, always the same way: three quarters train, one quarter test.

    Example:
        >>> digits = load_digits(torch.device("cpu"))
        >>> digits.train_images.shape, digits.test_labels.shape
        (torch.Size([1347, 1, 8, 8]), torch.Size([450]))
    """
    pixels, labels = sklearn.datasets.load_digits(return_X_y=True)
    parts = sklearn.model_selection.train_test_split(
        pixels.reshape(-1, 1, 8, 8) / 16, labels, test_size=0.25, stratify=labels, random_state=_SEED
    )
    train_images, test_images = (torch.tensor(part, dtype=torch.float32, device=device) for part in parts[:2])
    train_labels, test_labels = (torch.tensor(part, dtype=torch.int64, device=device) for part in parts[2:])
    return Digits(train_images, train_labels, test_images, test_labels)


def make_model() -> nn.Sequential:
    """Build the CNN, in float32: images [n, 1, 8, 8] to logits [n, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def train(
    name: str,
    digits: Digits,
    dtype: torch.dtype | None,
    epochs: int,
    on_step: Callable[[], object] = lambda: None,
) -> TrainingRun:
    """Train the CNN from a fixed seed, so that two calls differ in their precision alone.

    Args:
        name: What the run is called.
        digits: The data, on the device to train on.
        dtype: The lower precision of the mixed-precision regions; None trains in plain float32.
        epochs: Passes over the training images, at least 1.
        on_step: Called after every step.

    Returns:
        The run's losses, accuracy, time and casts.
    """
    device = digits.device
    torch.manual_seed(_SEED)
    model = make_model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scaler = _GradScaler(device.type, enabled=dtype is torch.float16)
    casts = WeightCastCounter(model)

    def step(batch: torch.Tensor) -> float:
        optimizer.zero_grad()
        with _region(device, dtype):
            loss = cross_entropy(model(digits.train_images[batch]), digits.train_labels[batch])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    losses: list[float] = []
    scales: list[float] = []
    times: list[float] = []
    for _ in range(epochs):
        order = torch.randperm(len(digits.train_images)).to(device)
        for batch in order.split(_BATCH_SIZE)[: digits.steps_per_epoch]:
            is_first = not losses
            _synchronize(device)
            start = time.perf_counter()
            # The first step is warm-up, so counting its casts costs no step that is timed.
            with casts if is_first else contextlib.nullcontext():
                losses.append(step(batch))
            _synchronize(device)
            if not is_first:
                times.append((time.perf_counter() - start) * 1e3)
            if scaler.is_enabled():
                scales.append(scaler.get_scale())
            on_step()

    with torch.no_grad(), _region(device, dtype):
        hits = model(digits.test_images).argmax(dim=1) == digits.test_labels
    return TrainingRun(
        name=name,
        losses=tuple(losses),
        loss_scales=tuple(scales),
        accuracy=hits.double().mean().item(),
        final_loss=statistics.fmean(losses[-digits.steps_per_epoch :]),
        ms_per_step=statistics.median(times),
        weight_casts_per_step=casts.count,
    )


def _region(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    if dtype is None:
        return contextlib.nullcontext()
    return mpamp.autocast(device=device.type, dtype=dtype)


def _synchronize(device: torch.device) -> None:
    torch.get_device_module(device).synchronize()
