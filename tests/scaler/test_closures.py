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
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("zeroes", [None, True, False])
def test_closure_after_unscaling(place: Any, make: Any, zeroes: bool | None) -> None:
    found = []
    for enabled in (True, False):
        weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        optimizer, scaler = make([weight]), GradScaler("cpu", enabled=enabled)
        scaler.scale(weight.square().sum()).backward()
        scaler.unscale_(optimizer)

        def closure(weight: Any = weight, optimizer: Any = optimizer, scaler: Any = scaler) -> Any:
            if zeroes is not None:
                optimizer.zero_grad(set_to_none=zeroes)
            loss = (weight * 3).sum()
            scaler.scale(loss).backward()
            return loss

        place(scaler, optimizer, closure)
        found += [weight.tolist(), weight.grad.tolist()]
    assert found[:2] == found[2:]


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_closure_of_a_second_step_is_refused_before_it_runs(
    place: Any, make: Any, scaler: GradScaler, weights: Any, run_backward: Any
) -> None:
    optimizer = make(weights)
    run_backward(scaler, weights)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
        place(scaler, optimizer, lambda: pytest.fail("the closure was called"))


class Sam(torch.optim.Optimizer):
    """Two evaluations a step: at the weights, and at the top of the climb from there."""

    uses_given_gradients = False

    def __init__(self, params: Any, rho: float = 0.5, lr: float = 0.1) -> None:
        super().__init__(params, {"rho": rho, "lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        params = [p for group in self.param_groups for p in group["params"]]
        closure = torch.enable_grad()(closure)
        loss = None if self.uses_given_gradients else closure()
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        before = [p.clone() for p in params]
        for p in params:
            p.add_(p.grad * self.param_groups[0]["rho"] / norm)
        self.zero_grad()
        loss = closure()
        for p, was in zip(params, before, strict=True):
            p.copy_(was)
        self.base.step()
        return loss


class SamOfGivenGradients(Sam):
    """As davda54/sam: the first gradients are there when it is called."""

    uses_given_gradients = True


def train_sam(
    make: Any, place: Any, scaler: GradScaler, factors: list[float], *, calls: int = 99
) -> tuple[list[float], list[float]]:
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = make([weight])
    scales = []
    for factor in factors:
        number = 0

        def closure() -> torch.Tensor:
            nonlocal number
            number += 1
            optimizer.zero_grad()
            loss = weight.square().sum()
            scaler.scale(loss * (factor if number >= calls else 1.0)).backward()  # noqa: B023
            return loss

        if optimizer.uses_given_gradients:
            closure()
        place(scaler, optimizer, closure)
        scaler.update()
        scales.append(scaler.get_scale())
    return weight.tolist(), scales


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("make", [Sam, SamOfGivenGradients])
def test_optimizer_that_evaluates_twice(make: Any, place: Any) -> None:
    plain, _ = train_sam(make, place, GradScaler("cpu", enabled=False), [1.0] * 5)
    scaled, _ = train_sam(make, place, GradScaler("cpu", init_scale=1024.0), [1.0] * 5)
    assert scaled == plain
    assert scaled != [1.0, 2.0]


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("make", [Sam, SamOfGivenGradients])
@pytest.mark.parametrize("calls", [1, 2])
def test_inf_in_an_evaluation_skips_and_puts_the_weights_back(make: Any, place: Any, calls: int) -> None:
    good, _ = train_sam(make, place, GradScaler("cpu", enabled=False), [1.0, 1.0])
    factors = [1.0, math.inf, math.nan, 1.0]
    weight, scales = train_sam(make, place, GradScaler("cpu", init_scale=64.0), factors, calls=calls)
    assert weight == good
    assert scales == [64.0, 32.0, 16.0, 16.0]


def test_optimizer_that_ignores_its_closure(scaler: GradScaler, weights: Any) -> None:
    class Ignores(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step()

    optimizer = Ignores(weights, lr=0.1)
    scaler.scale(torch.ones(()))
    assert scaler.step(optimizer, lambda: pytest.fail("the closure was called")) is None
    scaler.update()
    assert not scaler.last_step_skipped(optimizer)


def test_exception_in_a_closure_leaves_a_usable_scaler(scaler: GradScaler) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = Sam([weight])

    def fail() -> Any:
        raise KeyError("as asked")

    with pytest.raises(KeyError, match="as asked"):
        scaler.step(optimizer, fail)
    assert weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_no_closure_as_accelerate_passes_it(place: Any, scaler: GradScaler, weights: Any, run_backward: Any) -> None:
    run_backward(scaler, weights)
    assert place(scaler, torch.optim.SGD(weights, lr=0.1), None) is None
    assert torch.allclose(weights[0], torch.full((3,), 0.9))
