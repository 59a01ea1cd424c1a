"""Train on scikit-learn's digits with Ignite in mixed precision, on any device.

The line to change is the import: ``create_supervised_trainer`` and ``create_supervised_evaluator`` are mpamp's.
Usage: python ignite_digits.py [--device cpu] [--dtype float16] [--epochs 5] [--log-dir runs]
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack

import torch
from ignite.engine import Engine, Events
from ignite.metrics import Accuracy
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from mpamp.integrations.ignite import create_supervised_evaluator, create_supervised_trainer
from mpamp.integrations.logging import log_scale_events


def loaders() -> tuple[DataLoader, DataLoader]:
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train, test = TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])
    return DataLoader(train, batch_size=64, shuffle=True), DataLoader(test, batch_size=360)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--log-dir", help="write the loss scale for TensorBoard there")
    args = parser.parse_args()

    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    trainer = create_supervised_trainer(
        model,
        optimizer,
        torch.nn.functional.cross_entropy,
        device=args.device,
        dtype=dtype,
        scaler=dtype is torch.float16,
    )
    evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy()}, device=args.device, dtype=dtype)
    train, test = loaders()

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine: Engine) -> None:
        accuracy = evaluator.run(test).metrics["accuracy"]
        print(f"epoch {engine.state.epoch}: loss {engine.state.output:.4f}, accuracy {accuracy:.4f}")

    with ExitStack() as stack:
        if args.log_dir is not None:
            from torch.utils.tensorboard import SummaryWriter

            writer = stack.enter_context(SummaryWriter(args.log_dir))
            stack.enter_context(log_scale_events(writer, step=lambda: trainer.state.iteration))
        trainer.run(train, max_epochs=args.epochs)


if __name__ == "__main__":
    main()
