"""Modules and trainers for the tests of mpamp in Lightning, of whichever of its packages."""

from __future__ import annotations

import types
from typing import Any

import torch

from .digits import loss_of, make_model

__all__ = ["make_module", "make_trainer"]


def make_module(lightning: types.ModuleType, **parts: Any) -> Any:
    """Return a LightningModule that trains ``make_model()``; ``parts`` are methods and attributes to have besides."""

    def __init__(self: Any) -> None:
        lightning.LightningModule.__init__(self)
        self.model = make_model()
        self.dtypes = {}

    def training_step(self: Any, batch: Any, number: int) -> Any:
        return loss_of(self.model, batch)

    def configure_optimizers(self: Any) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    members = {"__init__": __init__, "training_step": training_step, "configure_optimizers": configure_optimizers}
    return type("Digits", (lightning.LightningModule,), {**members, **parts})()


def make_trainer(lightning: types.ModuleType, plugin: Any, **options: Any) -> Any:
    """Return a quiet Trainer on the processor."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    more = {"enable_model_summary": False, "max_epochs": 1, "accelerator": "cpu", "plugins": [plugin]}
    return lightning.Trainer(**{**quiet, **more, **options})
