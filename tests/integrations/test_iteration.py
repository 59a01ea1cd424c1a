"""One iteration of a scaler, where a framework steps optimizers one by one."""

from __future__ import annotations

import pytest
import torch

import mpamp
from mpamp.integrations.iteration import Iteration


def _two(
    growth_interval: int = 1, scale: float = 8.0
) -> tuple[list[torch.Tensor], list[torch.optim.Optimizer], Iteration]:
    weights = [torch.ones(2, requires_grad=True) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    scaler = mpamp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)
    return weights, list(optimizers), Iteration(scaler)


def test_both_steps_are_by_the_scale_that_both_losses_had() -> None:
    weights, optimizers, iteration = _two()
    for weight in weights:
        iteration.end()
        iteration.scaler.scale((weight * 3).sum()).backward()
    for optimizer in optimizers:
        iteration.step(optimizer, is_only=False)
    assert [weight.tolist() for weight in weights] == [[-2.0, -2.0]] * 2
    assert iteration.scaler.get_scale() == 8
    iteration.end()
    assert iteration.scaler.get_scale() == 16


def test_an_update_after_each_step_gives_the_second_a_wrong_scale() -> None:
    """What the class is there for; as torch's scaler does it."""
    weights, optimizers, iteration = _two()
    for weight in weights:
        iteration.scaler.scale((weight * 3).sum()).backward()
    for optimizer in optimizers:
        iteration.step(optimizer, is_only=True)
    assert weights[1].tolist() == [-0.5, -0.5]


def test_one_optimizer_ends_it_by_its_step() -> None:
    (weight, _), (optimizer, _), iteration = _two()
    iteration.scaler.scale(weight.sum()).backward()
    iteration.step(optimizer, is_only=True)
    assert iteration.scaler.get_scale() == 16
    iteration.end()
    assert iteration.scaler.get_scale() == 16


def test_a_second_step_of_one_optimizer_begins_another() -> None:
    (weight, _), (optimizer, _), iteration = _two()
    for _ in range(2):
        iteration.scaler.scale(weight.sum()).backward()
        iteration.step(optimizer, is_only=False)
        optimizer.zero_grad()
    assert len(iteration.scaler.history) == 1
    iteration.end()
    assert [record.scale for record in iteration.scaler.history] == [8, 16]


def test_gradients_are_unscaled_once_and_late_ones_too() -> None:
    (weight, _), (optimizer, _), iteration = _two()
    iteration.scaler.scale(weight.sum()).backward()
    for _ in range(2):
        iteration.unscale_(optimizer)
    assert weight.grad.tolist() == [1.0, 1.0]
    iteration.scaler.scale(weight.sum()).backward()
    iteration.unscale_(optimizer)
    assert weight.grad.tolist() == [2.0, 2.0]
    iteration.step(optimizer, is_only=True)
    assert weight.tolist() == [-1.0, -1.0]


def test_unscaling_after_the_step_begins_another() -> None:
    (weight, _), (optimizer, _), iteration = _two()
    iteration.scaler.scale(weight.sum()).backward()
    iteration.step(optimizer, is_only=False)
    weight.grad = None
    iteration.unscale_(optimizer)
    assert len(iteration.scaler.history) == 1


def test_an_inf_skips_the_step_that_owns_it() -> None:
    weights, optimizers, iteration = _two(growth_interval=100)
    iteration.scaler.scale(weights[0].sum() * float("inf")).backward()
    iteration.scaler.scale(weights[1].sum()).backward()
    for optimizer in optimizers:
        iteration.step(optimizer, is_only=False)
    iteration.end()
    assert [weight.tolist() for weight in weights] == [[1.0, 1.0], [0.0, 0.0]]
    assert iteration.scaler.get_scale() == 4


def test_torchs_scaler_is_served_too() -> None:
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    iteration = Iteration(torch.amp.GradScaler("cpu", init_scale=4.0))
    iteration.scaler.scale(weight.sum()).backward()
    iteration.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        iteration.unscale_(optimizer)
    iteration.step(optimizer, is_only=True)
    assert weight.item() == 0
