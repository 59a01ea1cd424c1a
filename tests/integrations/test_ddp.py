"""Two ranks under DDP, on gloo, in Lightning's Trainer and in Accelerate."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import mpamp
from tests.ranks import Reports

from .digits import batches, loss_of, make_model

STEPS = 4
MISSING = [name for name in ("accelerate", "lightning") if importlib.util.find_spec(name) is None]

WORKER = Path(__file__).with_name("ddp_worker.py")
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


def _weights_by_hand() -> list[float]:
    """Train on both ranks' batches at once; the second step is the one that is skipped."""
    model, scaler = make_model(), mpamp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    both = list(batches(2 * STEPS))
    for first, second in zip(both[0::2], both[1::2], strict=True):
        for batch in (first, second):
            with mpamp.autocast("cpu", torch.float16):
                loss = loss_of(model, batch)
            scaler.scale(loss / 2).backward()
        if first is both[2]:
            model[0].weight.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [weight.double().sum().item() for weight in model.parameters()]


@pytest.mark.parametrize("framework", ["lightning", "accelerate"])
def test_both_ranks_train_one_model_and_skip_together(framework: str, reports: Reports) -> None:
    first, second = (report[framework] for report in reports)
    assert first["weights"] == second["weights"]
    assert first["history"] == second["history"]
    assert first["history"] == [[65536.0, False], [65536.0, True], [32768.0, False], [32768.0, False]]
    assert first["weights"] == pytest.approx(_weights_by_hand(), abs=1e-3)


@pytest.mark.parametrize("framework", ["lightning", "accelerate"])
def test_each_rank_casts_each_weight_once_a_step(framework: str, reports: Reports) -> None:
    # The weights of a skipped step are the old ones, but a region ends with its step: they are cast again.
    assert [report[framework]["casts"] for report in reports] == [4 * STEPS] * 2


def test_accelerates_optimizer_knows_of_the_skip(reports: Reports) -> None:
    assert [report["accelerate"]["skipped"] for report in reports] == [[False, True, False, False]] * 2
