"""One step of each kind of workload: inference, training, training with two optimizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from .timing import Context

__all__ = ["Job", "MakeJob", "gan", "inference", "training"]

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Returns a function as it runs: itself, or what the compiler made of it."""


@dataclass(frozen=True)
class Job:
    """A model on a device that runs steps, in any region.

    Attributes:
        model: The model.
        optimizers: Those that its steps step; none in inference.
        step: Runs one step; takes what makes the region, and a scaler.
    """

    model: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    step: Callable[[Context, Any], None]


MakeJob = Callable[[nn.Module, tuple[torch.Tensor, ...], Wrap, tuple[torch.optim.Optimizer, ...]], Job]


def inference(model: nn.Module, batch: tuple[torch.Tensor, ...], wrap: Wrap, optimizers: Any) -> Job:
    """Return a job whose step is one forward pass without gradients; the batch's labels are not used."""
    inputs = batch[0]

    def forward(x: torch.Tensor) -> Any:
        return model(x)

    forward = wrap(forward)

    def step(region: Context, scaler: Any) -> None:
        with torch.no_grad(), region():
            forward(inputs)

    return Job(model, (), step)


def training(
    model: nn.Module,
    batch: tuple[torch.Tensor, ...],
    wrap: Wrap,
    optimizers: tuple[torch.optim.Optimizer, ...],
    accumulate: int = 1,
) -> Job:
    """Return a job whose step is ``accumulate`` passes, forward, loss and backward, and one of the optimizer."""
    inputs, labels = batch
    (optimizer,) = optimizers

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> Any:
        return cross_entropy(model(x).flatten(0, -2), y.flatten())

    loss_of = wrap(loss_of)

    def step(region: Context, scaler: Any) -> None:
        optimizer.zero_grad()
        for _ in range(accumulate):
            with region():
                loss = loss_of(inputs, labels)
            scaler.scale(loss / accumulate).backward()
        scaler.step(optimizer)
        scaler.update()

    return Job(model, optimizers, step)


def gan(
    model: nn.Module, batch: tuple[torch.Tensor, ...], wrap: Wrap, optimizers: tuple[torch.optim.Optimizer, ...]
) -> Job:
    """Return a job whose step trains the discriminator, then the generator, each with an optimizer of its own."""
    images, noise = batch
    of_generator, of_discriminator = optimizers
    generator, discriminator = (getattr(model, name) for name in ("generator", "discriminator"))

    def judged(x: torch.Tensor, answer: float) -> torch.Tensor:
        logits = discriminator(x)
        return binary_cross_entropy_with_logits(logits, torch.full_like(logits, answer))

    def loss_of_discriminator(real: torch.Tensor, z: torch.Tensor) -> Any:
        with torch.no_grad():
            fake = generator(z)
        return judged(real, 1.0) + judged(fake, 0.0)

    def loss_of_generator(z: torch.Tensor) -> Any:
        return judged(generator(z), 1.0)

    loss_of_discriminator, loss_of_generator = wrap(loss_of_discriminator), wrap(loss_of_generator)

    def step(region: Context, scaler: Any) -> None:
        of_discriminator.zero_grad()
        with region():
            loss = loss_of_discriminator(images, noise)
        scaler.scale(loss).backward()
        scaler.step(of_discriminator)
        of_generator.zero_grad()
        with region():
            loss = loss_of_generator(noise)
        scaler.scale(loss).backward()
        scaler.step(of_generator)
        scaler.update()

    return Job(model, optimizers, step)
