"""Train on scikit-learn's digits with Lightning's Fabric in mixed precision, on any device.

The line to change is ``precision="16-mixed"``: it is ``plugins=[MpampFabricPrecision("16-mixed")]``.
Usage: python fabric_digits.py [--accelerator cpu] [--precision bf16-mixed] [--epochs 5]
"""

from __future__ import annotations

import argparse

import torch
from lightning.fabric import Fabric, seed_everything
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from mpamp.integrations.lightning import MpampFabricPrecision


def loaders() -> tuple[DataLoader, DataLoader]:
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train, test = TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])
    return DataLoader(train, batch_size=64, shuffle=True), DataLoader(test, batch_size=360)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--precision", default="16-mixed", choices=["16-mixed", "bf16-mixed"])
    parser.add_argument("--epochs", default=5, type=int)
    arguments = parser.parse_args()

    seed_everything(0)
    plugin = MpampFabricPrecision(arguments.precision)
    fabric = Fabric(accelerator=arguments.accelerator, devices=1, plugins=[plugin])
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 10))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    train, test = fabric.setup_dataloaders(*loaders())
    for _ in range(arguments.epochs):
        for images, labels in train:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        images, labels = next(iter(test))
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    scale = "none" if plugin.scaler is None else f"{plugin.scaler.get_scale():.0f}"
    print(f"accuracy {accuracy:.4f}  loss scale {scale}")


if __name__ == "__main__":
    main()
