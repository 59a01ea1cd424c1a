"""Gradient scaling: scale, unscale_, step and update, mpamp's scaler against torch's.

The two scalers take turns on equal parameters. Each iteration scales a loss and sets no gradients: unscaling by a
scale of 1 leaves them as they are, so every iteration does the same work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...scaler import GradScaler
from ..counts import count
from ..rows import Row, with_ratios
from ..timing import Variant, measure

__all__ = ["OPTIMIZERS", "SCALER_BASE", "new_iteration", "run"]

SCALER_BASE = "torch.amp.GradScaler"
"""What mpamp's scaler is compared with."""

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD, foreach": {"type": torch.optim.SGD, "foreach": True},
    "Adam, foreach": {"type": torch.optim.Adam, "foreach": True},
    "Adam, fused": {"type": torch.optim.Adam, "fused": True},
    "scaler alone": {"type": None},
}


class Idle(torch.optim.Optimizer):
    """Does nothing, so that the scaler's own time is left."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, defaults)

    def step(self, closure: Any = None) -> Any:
        pass


def new_iteration(
    scaler_type: Any, device: torch.device, parameters: int, *, is_unscaled_first: bool, **options: Any
) -> Callable[[int], None]:
    """Return what runs n iterations on parameters of its own."""
    weights = [torch.nn.Parameter(torch.randn(16, device=device)) for _ in range(parameters)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    make = options.pop("type") or Idle
    optimizer = make(weights, lr=1e-6, **options)
    scaler = scaler_type(device.type, init_scale=1.0, growth_interval=10**9)
    loss = torch.ones((), device=device)

    def batch(n: int) -> None:
        for _ in range(n):
            scaler.scale(loss)
            if is_unscaled_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()

    return batch


def run(device: torch.device, rounds: int, *, is_quick: bool) -> list[Row]:
    """Time each optimizer's iteration under torch's scaler and mpamp's."""
    found: list[Row] = []
    parameters = 20 if is_quick else 1000
    for name, optimizer in OPTIMIZERS.items():
        for is_unscaled_first in (True, False):
            variants = [
                Variant(
                    who,
                    new_iteration(make, device, parameters, is_unscaled_first=is_unscaled_first, **dict(optimizer)),
                )
                for who, make in ((SCALER_BASE, torch.amp.GradScaler), ("mpamp.GradScaler", GradScaler))
            ]
            timings = measure(variants, device, rounds=rounds, turn_s=0.001 if is_quick else 0.02)
            calls = "scale, unscale_, step, update" if is_unscaled_first else "scale, step, update"
            rows = [
                Row("micro", f"scaler: {name}; {calls}", v.name, time=t, counts=count(v, (), device, is_compiled=False))
                for v, t in zip(variants, timings, strict=True)
            ]
            found += with_ratios(rows, SCALER_BASE)
    return found
