"""Ignite's supervised trainer with amp_mode="amp"."""

import argparse

import torch
import torch.nn as nn
from ignite.engine import Events, create_supervised_trainer
from ignite.metrics import Average
from ignite.utils import manual_seed
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--no-amp", action="store_true")
parser.add_argument("--seed", default=0, type=int)
args = parser.parse_args()

manual_seed(args.seed)
device = "cuda"
digits = load_digits()
images = torch.tensor(digits.images[:512], dtype=torch.float32) / 16
loader = DataLoader(
    TensorDataset(images, torch.tensor(digits.target[:512])), batch_size=64, shuffle=True, pin_memory=True
)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
amp = {} if args.no_amp else {"amp_mode": "amp", "scaler": True}
trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss(), device=device, non_blocking=True, **amp)
Average(output_transform=lambda loss: loss).attach(trainer, "loss")


@trainer.on(Events.EPOCH_COMPLETED)
def report(engine):
    print(f"epoch {engine.state.epoch} Loss {float(engine.state.metrics['loss']):.6f}")


trainer.run(loader, max_epochs=3)
