"""Lightning's Trainer on a GPU, in 16-mixed."""

import argparse
import logging

import lightning as L
import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.losses = []

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.losses.append(loss.item())
        return loss

    def on_train_epoch_end(self):
        print(f"epoch {self.current_epoch} Loss {sum(self.losses) / len(self.losses):.6f}")
        self.losses.clear()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", default="16-mixed")
    parser.add_argument("--accelerator", default="gpu")
    parser.add_argument("--seed", default=0, type=int)
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    L.seed_everything(args.seed)
    digits = load_digits()
    images = torch.tensor(digits.images[:512], dtype=torch.float32) / 16
    data = DataLoader(TensorDataset(images, torch.tensor(digits.target[:512])), batch_size=64, shuffle=True)
    trainer = L.Trainer(
        accelerator=args.accelerator,
        devices=1,
        precision=args.precision,
        max_epochs=3,
        gradient_clip_val=5.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), data)
