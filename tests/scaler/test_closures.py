"""Closures, by keyword and by position: run once, or refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mpamp.errors import ScalerUsageError
from mpamp.scaler import GradScaler

PLACES = {
    "keyword": lambda scaler, optimizer, closure: scaler.step(optimizer, closure=closure),
    "position": lambda scaler, optimizer, closure: scaler.step(optimizer, closure),
}
OPTIMIZERS = {
    "plain": lambda p: torch.optim.Adam(p, lr=0.1),
    "fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
}


def train(make: Any, place: Any, scaler: GradScaler, factor: float = 1.0) -> tuple[Any, torch.Tensor, int]:
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = make([weight])
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = weight.square().sum() * factor
        scaler.scale(loss).backward()
        return loss

    with torch.no_grad():
        value = place(scaler, optimizer, closure)
    scaler.update()
    return value, weight.detach(), calls


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_closure_trains_as_without_a_scaler(make: Any, place: Any) -> None:
    value, weight, calls = train(make, place, GradScaler("cpu"))
    plain_value, plain_weight, _ = train(make, place, GradScaler("cpu", enabled=False))
    assert value.item() == plain_value.item() == 5.0
    assert torch.equal(weight, plain_weight)
    assert calls == 1


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_closure_with_inf_skips(make: Any, place: Any) -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    value, weight, _ = train(make, place, scaler, math.inf)
    assert value.item() == math.inf
    assert torch.equal(weight, torch.tensor([1.0, 2.0]))
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_optimizer_that_evaluates_again_is_refused_before_it_does(place: Any) -> None:
    scaler = GradScaler("cpu")
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(RuntimeError, match=r"LBFGS.*Closure use is not supported") as caught:
        place(scaler, torch.optim.LBFGS([weight]), lambda: pytest.fail("the closure was called"))
    assert isinstance(caught.value, ScalerUsageError)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("method", ["unscale_", "step"])
def test_closure_after_unscaling_is_refused(
    place: Any, method: str, scaler: GradScaler, weights: Any, run_backward: Any
) -> None:
    optimizer = torch.optim.SGD(weights, lr=0.1)
    run_backward(scaler, weights)
    getattr(scaler, method)(optimizer)
    with pytest.raises(ScalerUsageError, match="closure"):
        place(scaler, optimizer, lambda: pytest.fail("the closure was called"))


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_no_closure_as_accelerate_passes_it(place: Any, scaler: GradScaler, weights: Any, run_backward: Any) -> None:
    run_backward(scaler, weights)
    assert place(scaler, torch.optim.SGD(weights, lr=0.1), None) is None
    assert torch.allclose(weights[0], torch.full((3,), 0.9))
