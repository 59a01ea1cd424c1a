"""Train a small timm model on scikit-learn's digits in mixed precision, on any device.

The lines to change are the import of ``NativeScaler`` and the region. The rest is timm's.
Usage: python timm_digits.py [--device cpu] [--epochs 3]
"""

from __future__ import annotations

import argparse

import timm
import timm.optim
import torch
from sklearn.datasets import load_digits

import mpamp
from mpamp.integrations.timm import NativeScaler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    torch.manual_seed(0)
    digits = load_digits()
    images = (torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16).to(args.device)
    labels = torch.tensor(digits.target).to(args.device)
    sizes = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 64, "depth": 2, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, **sizes).to(args.device)
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=3e-3)
    loss_scaler = NativeScaler(args.device)
    for epoch in range(args.epochs):
        model.train()
        for batch in torch.randperm(1437).split(64):
            with mpamp.autocast(args.device, dtype=torch.float16):
                loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        model.eval()
        with torch.inference_mode(), mpamp.autocast(args.device, dtype=torch.float16):
            accuracy = (model(images[1437:]).argmax(1) == labels[1437:]).float().mean().item()
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}, accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
