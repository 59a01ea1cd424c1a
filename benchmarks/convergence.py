"""Whether float16 training with mpamp ends where float32 training does: two models, several seeds.

    PYTHONPATH=. python benchmarks/convergence.py [--device cuda] [--seeds 3] [--steps 300] [--json PATH]

Both models classify scikit-learn's digits: a small CNN, and a transformer that reads the eight rows of an
image. Per seed, model and precision: the mean loss of the last 20 steps, and the steps that the scaler
skipped. "Within the spread" says that the mean over the seeds of float16 differs from float32's by less
than the seeds of float32 differ among themselves.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits

import mpamp

LAST = 20


class Rows(torch.nn.Module):
    """A transformer over the rows of an image: (batch, 1, 8, 8) -> (batch, 10)."""

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.embed, self.position = torch.nn.Linear(8, 64), torch.nn.Parameter(torch.zeros(8, 64))
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.embed(images.squeeze(1)) + self.position
        return self.head(self.encoder(tokens).mean(1))  # type: ignore[no-any-return]


def cnn() -> torch.nn.Module:
    conv = torch.nn.Conv2d
    layers = [conv(1, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), conv(16, 32, 3, padding=1)]
    layers += [torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten(), torch.nn.Linear(32 * 16, 10)]
    return torch.nn.Sequential(*layers)


def train(make: Any, seed: int, device: torch.device, dtype: torch.dtype | None, steps: int) -> dict[str, float]:
    """Train one model; None is float32 without a region or scaler."""
    torch.manual_seed(seed)
    digits = load_digits()
    images = (torch.tensor(digits.images, dtype=torch.float32) / 16)[:, None].to(device)
    labels = torch.tensor(digits.target).to(device)
    model = make().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = mpamp.GradScaler(device, enabled=dtype is torch.float16)
    batches = torch.randint(len(labels), (steps, 128), generator=torch.Generator().manual_seed(seed)).to(device)
    losses, skipped = [], 0
    for batch in batches:
        optimizer.zero_grad()
        with mpamp.autocast(device.type, dtype, enabled=dtype is not None):
            loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        skipped += bool(scaler.is_enabled() and scaler.last_step_skipped(optimizer))
        scaler.update()
        losses.append(loss.detach())
    return {"loss": torch.stack(losses[-LAST:]).float().mean().item(), "skipped": skipped}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--json", type=Path)
    chosen = options.parse_args()
    card = torch.get_device_module(chosen.device).get_device_name() if chosen.device.index is not None else ""
    found: dict[str, Any] = {"torch": torch.__version__, "device": str(chosen.device), "card": card, "models": {}}
    for name, make in (("cnn", cnn), ("transformer", Rows)):
        runs = {
            str(dtype or torch.float32): [
                train(make, seed, chosen.device, dtype, chosen.steps) for seed in range(chosen.seeds)
            ]
            for dtype in (None, torch.float16, torch.bfloat16)
        }
        means = {dtype: statistics.mean(r["loss"] for r in each) for dtype, each in runs.items()}
        single = [r["loss"] for r in runs["torch.float32"]]
        spread = max(single) - min(single)
        found["models"][name] = {"runs": runs, "mean": means, "spread of float32": spread}
        for dtype, mean in means.items():
            is_within = abs(mean - means["torch.float32"]) <= spread
            print(f"{name:12} {dtype:15} loss {mean:.5f}  within the spread of {spread:.5f}: {is_within}", flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
