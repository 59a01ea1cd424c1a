"""Accelerate: a loop of one's own, prepared."""

import argparse

import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", default="fp16", choices=["no", "fp16", "bf16"])
    parser.add_argument("--gradient_accumulation_steps", default=2, type=int)
    parser.add_argument("--seed", default=0, type=int)
    args = parser.parse_args()
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision, gradient_accumulation_steps=args.gradient_accumulation_steps
    )
    set_seed(args.seed)
    digits = load_digits()
    images = torch.tensor(digits.images[:512], dtype=torch.float32) / 16
    loader = DataLoader(TensorDataset(images, torch.tensor(digits.target[:512])), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 16, gamma=0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in range(3):
        total = 0.0
        for image, label in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(image), label)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total += accelerator.gather(loss.detach()).mean().item()
        accelerator.print(f"epoch {epoch} Loss {total / len(loader):.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
