"""The time of gradient scaling: scale, unscale_, step and update, mpamp's scaler against torch's.

    python benchmarks/scaler.py [--device cuda] [--parameters 1000] [--json scaler.json]

The two scalers take turns on equal parameters. Each iteration scales a loss and sets no gradients: unscaling by a
scale of 1 leaves them as they are, so every iteration does the same work. The target is torch's time or less.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from common import HostSyncCounter, Variant, measure, parser, print_table, settings, start, write_json

from mpamp.scaler import GradScaler

TARGET = 1.0
"""The share of torch's time that a whole iteration may take."""

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

    def step(self, closure: Any = None) -> None:
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


def count_waits(batch: Callable[[int], None], device: torch.device) -> int:
    """Count how often the host waits for the device in an iteration; on a CPU, how often it reads a value."""
    batch(2)
    module = torch.get_device_module(device)
    if not hasattr(module, "set_sync_debug_mode"):
        with HostSyncCounter() as reads:
            batch(1)
        return reads.count
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module.set_sync_debug_mode("warn")
        batch(1)
        module.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def main() -> None:
    options = parser(__doc__, threads=1)
    options.add_argument("--parameters", type=int, default=1000, help="how many there are (default: 1000)")
    options = options.parse_args()
    start(options)
    rows = []
    for name, optimizer in OPTIMIZERS.items():
        for is_unscaled_first in (True, False):
            made = [
                new_iteration(
                    scaler_type,
                    options.device,
                    options.parameters,
                    is_unscaled_first=is_unscaled_first,
                    **dict(optimizer),
                )
                for scaler_type in (torch.amp.GradScaler, GradScaler)
            ]
            variants = [Variant(who, batch) for who, batch in zip(("torch", "mpamp"), made, strict=True)]
            turn_s = 0.001 if options.quick else 0.02
            torchs, ours = measure(variants, options.device, rounds=options.rounds, turn_s=turn_s)
            waits = [count_waits(batch, options.device) for batch in made]
            calls = "scale, unscale_, step, update" if is_unscaled_first else "scale, step, update"
            ratio = round(ours.us / torchs.us, 3)
            row = {"optimizer": name, "calls": calls, "torch": torchs, "mpamp": ours, "ratio": ratio}
            rows.append({**row, "waits": dict(zip(("torch", "mpamp"), waits, strict=True))})
    print_table(
        f"One iteration over {options.parameters} parameters, us (medians)",
        ("optimizer", "calls", "torch", "mpamp", "mpamp / torch", "torch waits", "mpamp waits"),
        [(r["optimizer"], r["calls"], r["torch"].us, r["mpamp"].us, r["ratio"], *r["waits"].values()) for r in rows],
    )
    ratio = max(r["ratio"] for r in rows if r["calls"].startswith("scale, unscale_"))
    print(f"\nscale + unscale_ + step + update: at most {ratio:.2f} of torch's time (target: at most {TARGET})")
    write_json(options.json, "scaler", options.device, settings(options), target=TARGET, ratio=ratio, rows=rows)


if __name__ == "__main__":
    main()
