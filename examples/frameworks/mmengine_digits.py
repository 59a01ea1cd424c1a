"""Train on scikit-learn's digits with MMEngine's Runner in mixed precision, on any device.

The line to change is ``optim_wrapper``'s ``type``; a configuration file has
``custom_imports = dict(imports=["mpamp.integrations.mmengine"])`` beside it.
Usage: python mmengine_digits.py [--work-dir work] [--epochs 5]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.model import BaseModel
from mmengine.runner import Runner
from sklearn.datasets import load_digits
from torch.utils.data import Dataset, TensorDataset

import mpamp.integrations.mmengine  # noqa: F401  # registers MpampOptimWrapper


class Classifier(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def forward(self, images: torch.Tensor, labels: torch.Tensor, mode: str = "tensor") -> Any:
        logits = self.layers(images)
        if mode == "loss":
            return {"loss": torch.nn.functional.cross_entropy(logits, labels)}
        return (logits, labels) if mode == "predict" else logits


class Accuracy(BaseMetric):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        logits, labels = data_samples
        self.results.append({"right": (logits.argmax(1) == labels).sum().item(), "all": len(labels)})

    def compute_metrics(self, results: list[dict[str, int]]) -> dict[str, float]:
        return {"accuracy": sum(r["right"] for r in results) / sum(r["all"] for r in results)}


def loader(data: Dataset, *, shuffle: bool) -> dict[str, Any]:
    sampler = {"type": "DefaultSampler", "shuffle": shuffle}
    return {"batch_size": 64, "dataset": data, "sampler": sampler, "collate_fn": {"type": "default_collate"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", default="work")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    runner = Runner(
        Classifier(),
        args.work_dir,
        train_dataloader=loader(TensorDataset(images[:1437], labels[:1437]), shuffle=True),
        train_cfg={"by_epoch": True, "max_epochs": args.epochs, "val_interval": args.epochs},
        val_dataloader=loader(TensorDataset(images[1437:], labels[1437:]), shuffle=False),
        val_cfg={},
        val_evaluator=Evaluator(Accuracy()),
        optim_wrapper={
            "type": "MpampOptimWrapper",
            "dtype": "float16",
            "optimizer": {"type": "Adam", "lr": 5e-3},
            "clip_grad": {"max_norm": 1.0},
        },
        randomness={"seed": 0},
        log_level="WARNING",
    )
    runner.train()
    scaler = runner.optim_wrapper.loss_scaler
    accuracy = runner.message_hub.get_scalar("val/accuracy").current()
    print(f"{len(scaler.history)} steps, scale {scaler.get_scale():g}, accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
