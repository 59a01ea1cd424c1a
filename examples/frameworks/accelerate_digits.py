"""Train on scikit-learn's digits with Accelerate in mixed precision, on any device.

The line to change is the import: ``Accelerator`` is mpamp's.
Usage: python accelerate_digits.py [--cpu] [--mixed-precision bf16] [--epochs 5]
       accelerate launch accelerate_digits.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from mpamp.integrations.accelerate import Accelerator


def loaders() -> tuple[DataLoader, DataLoader]:
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train, test = TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])
    return DataLoader(train, batch_size=64, shuffle=True), DataLoader(test, batch_size=360)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--mixed-precision", default="fp16", choices=["no", "fp16", "bf16"])
    parser.add_argument("--epochs", default=5, type=int)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    accelerator = Accelerator(
        cpu=arguments.cpu,
        mixed_precision=arguments.mixed_precision,
        gradient_accumulation_steps=2,
        ops={"layer_norm": "fp32"},
        persistent_cache=True,
    )
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.LayerNorm(128), torch.nn.Linear(128, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12 * arguments.epochs)
    model, optimizer, train, test, scheduler = accelerator.prepare(model, optimizer, *loaders(), scheduler)
    for _ in range(arguments.epochs):
        for images, labels in train:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    correct = []
    with torch.no_grad():
        for images, labels in test:
            correct.append(accelerator.gather_for_metrics(model(images).argmax(1) == labels))
    scale = "none" if accelerator.scaler is None else f"{accelerator.scaler.get_scale():.0f}"
    accelerator.print(f"accuracy {torch.cat(correct).float().mean().item():.4f}  loss scale {scale}")


if __name__ == "__main__":
    main()
