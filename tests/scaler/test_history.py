"""The history: kept on the device, read when asked."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch

from mpamp.scaler import GradScaler, ScaleRecord


def train(scaler: GradScaler, optimizer: Any, run_backward: Any, *factors: float) -> None:
    for factor in factors:
        optimizer.zero_grad()
        run_backward(scaler, optimizer.param_groups[0]["params"], factor=factor)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("fused", [False, True])
def test_scale_and_skip_of_each_update(fused: bool, weights: Any, run_backward: Any) -> None:
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=2)
    optimizer = torch.optim.SGD(weights, lr=0.1, fused=fused)
    train(scaler, optimizer, run_backward, 1.0, math.inf, 1.0, 1.0, 1.0)
    assert scaler.history == [
        ScaleRecord(1, 8.0, False),
        ScaleRecord(2, 8.0, True),
        ScaleRecord(3, 4.0, False),
        ScaleRecord(4, 4.0, False),
        ScaleRecord(5, 8.0, False),
    ]


@pytest.mark.parametrize("size", [0, 1, 3])
def test_only_the_last_are_kept(size: int, weights: Any, run_backward: Any) -> None:
    scaler = GradScaler("cpu", init_scale=64.0, history_size=size)
    train(scaler, torch.optim.SGD(weights, lr=0.1), run_backward, 1.0, math.inf, 1.0, math.inf)
    assert [r.step for r in scaler.history] == [1, 2, 3, 4][4 - size :]
    assert [r.scale for r in scaler.history] == [64.0, 64.0, 32.0, 32.0][4 - size :]


def test_any_optimizers_skip_is_recorded(scaler: GradScaler, weights: Any, run_backward: Any) -> None:
    optimizers = [torch.optim.SGD([w], lr=0.1) for w in weights]
    run_backward(scaler, weights[:1])
    run_backward(scaler, weights[1:], factor=math.inf)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.history == [ScaleRecord(1, 1024.0, True)]


def test_update_to_a_new_scale_records_the_step_before(scaler: GradScaler, weights: Any, run_backward: Any) -> None:
    optimizer = torch.optim.SGD(weights, lr=0.1)
    run_backward(scaler, weights)
    scaler.step(optimizer)
    scaler.update(8.0)
    train(scaler, optimizer, run_backward, 1.0)
    scaler.update(16.0)  # nothing was stepped: no record
    assert scaler.history == [ScaleRecord(1, 1024.0, False), ScaleRecord(2, 8.0, False)]


def test_records_do_not_change_with_the_scale(scaler: GradScaler, weights: Any, run_backward: Any) -> None:
    train(scaler, torch.optim.SGD(weights, lr=0.1), run_backward, 1.0)
    before = scaler.history
    assert scaler._scale is not None
    scaler._scale.fill_(2.0)
    assert scaler.history == before


def test_history_survives_pickling(scaler: GradScaler, weights: Any, run_backward: Any) -> None:
    optimizer = torch.optim.SGD(weights, lr=0.1)
    train(scaler, optimizer, run_backward, 1.0, math.inf)
    other = pickle.loads(pickle.dumps(scaler))
    train(other, optimizer, run_backward, 1.0)
    assert other.history == [*scaler.history, ScaleRecord(3, 512.0, False)]


def test_long_history_stays_in_order(weights: Any, run_backward: Any) -> None:
    scaler = GradScaler("cpu", init_scale=2.0, history_size=100, growth_interval=1)
    optimizer = torch.optim.SGD(weights, lr=0.1, fused=True)
    train(scaler, optimizer, run_backward, *[1.0, math.inf] * 75)
    assert [r.step for r in scaler.history] == list(range(51, 151))
    assert [r.skipped for r in scaler.history] == [False, True] * 50
    assert {r.scale for r in scaler.history} == {2.0, 4.0}
