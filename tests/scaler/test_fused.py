"""Optimizers whose kernels unscale and skip by themselves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mpamp.scaler import GradScaler


def test_lent_attributes_are_the_scale_and_exactly_one(
    scaler: GradScaler, weights: Any, run_backward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = torch.optim.Adam(weights, fused=True)
    seen = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append((o.grad_scale, o.found_inf)))
    run_backward(scaler, weights, factor=math.inf)
    # Several devices, or kinds of gradients, each have a found_inf: their sum would make the kernel step.
    device = torch.device("cpu")
    monkeypatch.setattr(
        scaler, "_unscale_grads_", lambda *_: {device: torch.tensor(1.0), torch.device("cpu", 0): torch.tensor(1.0)}
    )
    scaler.step(optimizer)
    ((scale, found_inf),) = seen
    assert (scale.item(), found_inf.item()) == (1024.0, 1.0)
    assert torch.equal(weights[0], torch.ones(3))
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


def test_users_grad_scale_is_multiplied(scaler: GradScaler, weights: Any, run_backward: Any) -> None:
    optimizer = torch.optim.SGD(weights, lr=1.0, fused=True)
    run_backward(scaler, weights, factor=2.0)
    optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]
    scaler.step(optimizer)
    assert torch.equal(weights[0], torch.zeros(3))


def test_attributes_are_taken_away_after_an_exception(scaler: GradScaler, weights: Any, run_backward: Any) -> None:
    optimizer = torch.optim.SGD(weights, lr=1.0, fused=True)
    handle = optimizer.register_step_pre_hook(lambda *_: pytest.fail("as asked"))
    run_backward(scaler, weights)
    with pytest.raises(pytest.fail.Exception):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale")
    handle.remove()
    scaler.step(optimizer)
    assert torch.equal(weights[0], torch.zeros(3))


def test_gradients_are_unscaled_once_with_unscale(scaler: GradScaler, weights: Any, run_backward: Any) -> None:
    optimizer = torch.optim.SGD(weights, lr=1.0, fused=True)
    run_backward(scaler, weights)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert torch.equal(weights[0], torch.zeros(3))


def test_momentum_after_a_skipped_first_step(run_backward: Any) -> None:
    found = []
    for fused in (False, True):
        weight = torch.nn.Parameter(torch.ones(100))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, foreach=False if not fused else None, fused=fused)
        scaler = GradScaler("cpu")
        for factor in (math.inf, 1.0, 1.0, math.inf, 1.0):
            # Memory that the optimizer may get, unset, for its momentum.
            junk = torch.full((100,), math.nan)
            optimizer.zero_grad()
            run_backward(scaler, [weight], factor=factor)
            del junk
            scaler.step(optimizer)
            scaler.update()
        found.append(weight.detach())
    assert torch.equal(*found)


def test_momentum_of_a_first_step_is_kept(scaler: GradScaler, weights: Any, run_backward: Any) -> None:
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9, fused=True)
    run_backward(scaler, weights)
    scaler.step(optimizer)
    assert torch.equal(optimizer.state[weights[0]]["momentum_buffer"], torch.ones(3))


class TakesScaler(torch.optim.SGD):
    """The older protocol: ``step`` asks the scaler."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
        grad_scaler.unscale_(self)
        if not sum(v.item() for v in grad_scaler._found_inf_per_device(self).values()):
            super().step()


@pytest.mark.parametrize("factor", [1.0, math.nan])
def test_optimizer_that_takes_the_scaler(scaler: GradScaler, weights: Any, run_backward: Any, factor: float) -> None:
    optimizer = TakesScaler(weights, lr=0.5)
    run_backward(scaler, weights, factor=factor)
    with pytest.warns(FutureWarning, match="stop passing itself") as caught:
        scaler.step(optimizer)
    assert caught[0].filename == __file__
    scaler.update()
    is_good = factor == 1.0
    assert torch.equal(weights[0], torch.full((3,), 0.5 if is_good else 1.0))
    assert scaler.last_step_skipped(optimizer) is not is_good


def test_float16_gradients_are_the_kernels_business(scaler: GradScaler) -> None:
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    weight.grad = torch.full_like(weight, 1024)
    scaler.scale(torch.ones(()))
    scaler.step(torch.optim.SGD([weight], lr=0.5, fused=True))
    assert torch.equal(weight, torch.full((3,), 0.5, dtype=torch.float16))
