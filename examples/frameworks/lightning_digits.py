"""Train on scikit-learn's digits with Lightning's Trainer in mixed precision, on any device.

The line to change is ``precision="16-mixed"``: it is ``plugins=[MpampPrecision("16-mixed")]``.
Usage: python lightning_digits.py [--accelerator cpu] [--precision bf16-mixed] [--epochs 5] [--resume last.ckpt]
"""

from __future__ import annotations

import argparse

import lightning
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from mpamp.integrations.lightning import MpampPrecision


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.LayerNorm(128), torch.nn.Linear(128, 10)
        )

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.model(images), labels)

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> None:
        images, labels = batch
        correct = (self.model(images).argmax(1) == labels).float()
        self.log("accuracy", correct.mean(), batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


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
    parser.add_argument("--resume", help="a checkpoint, of Lightning's own mixed precision or of mpamp's")
    parser.add_argument("--save", help="where to write a checkpoint at the end")
    arguments = parser.parse_args()

    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        accelerator=arguments.accelerator,
        plugins=[MpampPrecision(arguments.precision, ops={"layer_norm": "fp32"}, persistent_cache=True)],
        max_epochs=arguments.epochs,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        log_every_n_steps=1,
    )
    train, test = loaders()
    trainer.fit(Digits(), train, test, ckpt_path=arguments.resume)
    scale = "none" if trainer.scaler is None else f"{trainer.scaler.get_scale():.0f}"
    print(f"accuracy {trainer.callback_metrics['accuracy']:.4f}  loss scale {scale}")
    if arguments.save:
        trainer.save_checkpoint(arguments.save, weights_only=False)


if __name__ == "__main__":
    main()
