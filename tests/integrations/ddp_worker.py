"""One of two ranks that train under DDP in Lightning's Trainer and in Accelerate; run by test_ddp.py.

Each rank has batches of its own, and the second batch of rank 0 alone has an inf.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")

import accelerate  # noqa: E402
import lightning  # noqa: E402

import mpamp  # noqa: E402
from mpamp.integrations.accelerate import Accelerator  # noqa: E402
from mpamp.integrations.lightning import MpampPrecision  # noqa: E402
from mpamp.testing.counting import WeightCastCounter  # noqa: E402
from tests.integrations.digits import batches, loss_of, make_model  # noqa: E402
from tests.integrations.lightning_models import make_module, make_trainer  # noqa: E402

STEPS = 4


def _batches(rank: int) -> list[Any]:
    mine = list(batches(2 * STEPS))[rank::2]
    images, labels = mine[1]
    if rank == 0:
        mine[1] = (torch.where(torch.arange(64) == 20, torch.inf, images), labels)
    return mine


def _report(model: torch.nn.Module, scaler: mpamp.GradScaler, casts: WeightCastCounter) -> dict[str, Any]:
    history = [(record.scale, record.skipped) for record in scaler.history]
    weights = [weight.double().sum().item() for weight in model.parameters()]
    return {"weights": weights, "history": history, "casts": casts.count}


def _by_lightning(rank: int) -> dict[str, Any]:
    strategy = lightning.pytorch.strategies.DDPStrategy(process_group_backend="gloo")
    plugin = MpampPrecision("16-mixed")
    module = make_module(lightning)
    trainer = make_trainer(lightning, plugin, strategy=strategy, devices=2, use_distributed_sampler=False)
    with WeightCastCounter(module) as casts:
        trainer.fit(module, torch.utils.data.DataLoader(_batches(rank), batch_size=None))
    return _report(module.model, plugin.scaler, casts)


def _by_accelerate(rank: int) -> dict[str, Any]:
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert accelerator.num_processes == 2
    skipped = []
    with WeightCastCounter(model) as casts:
        for batch in _batches(rank):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            skipped.append(optimizer.step_was_skipped)
            optimizer.zero_grad()
    return {**_report(model, accelerator.scaler, casts), "skipped": skipped, "version": accelerate.__version__}


def main(rank: int, store: str, report: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # named, not used: the group is there already
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    found = {"lightning": _by_lightning(rank), "accelerate": _by_accelerate(rank)}
    Path(report).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()  # the other may still be connecting to this one
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
