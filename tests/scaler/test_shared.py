"""Parameters that two optimizers own: their gradients are unscaled once, or the scaler says no."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch

from mpamp.errors import ScalerUsageError
from mpamp.scaler import GradScaler

SGD = torch.optim.SGD


class Two:
    """A parameter of both optimizers, and one of the second alone."""

    def __init__(self, **options: Any) -> None:
        self.shared = torch.nn.Parameter(torch.ones(2))
        self.only = torch.nn.Parameter(torch.ones(2))
        self.first = SGD([("shared", self.shared)], lr=0.1)
        self.second = SGD([("shared", self.shared), ("only", self.only)], lr=0.1, **options)

    def backward(self, scaler: GradScaler, factor: float = 1.0) -> None:
        scaler.scale((self.shared * 3 + self.only).sum() * factor).backward()

    def grads(self) -> list[list[float]]:
        assert self.shared.grad is not None
        assert self.only.grad is not None
        return [self.shared.grad.tolist(), self.only.grad.tolist()]


UNSCALED = [[3.0, 3.0], [1.0, 1.0]]


@pytest.fixture
def two() -> Two:
    return Two()


@pytest.mark.parametrize("iterations", [1, 3])
def test_unscaled_once_by_unscale(scaler: GradScaler, two: Two, iterations: int) -> None:
    for _ in range(iterations):
        two.second.zero_grad()
        two.backward(scaler)
        scaler.unscale_(two.first)
        scaler.unscale_(two.second)
        assert two.grads() == UNSCALED
        scaler.step(two.first)
        scaler.step(two.second)
        scaler.update()


@pytest.mark.parametrize("iterations", [1, 3])
def test_unscaled_once_by_step(scaler: GradScaler, two: Two, iterations: int) -> None:
    for _ in range(iterations):
        two.second.zero_grad()
        two.backward(scaler)
        scaler.step(two.first)
        scaler.step(two.second)
        assert two.grads() == UNSCALED
        scaler.update()
    assert torch.allclose(two.shared, torch.full((2,), 1 - 0.6 * iterations))
    assert torch.allclose(two.only, torch.full((2,), 1 - 0.1 * iterations))


def test_three_owners(scaler: GradScaler, two: Two) -> None:
    third = SGD([two.shared], lr=0.1)
    two.backward(scaler)
    for optimizer in (two.first, two.second, third):
        scaler.unscale_(optimizer)
    assert two.grads() == UNSCALED


def test_inf_in_the_shared_gradient_skips_both(scaler: GradScaler, two: Two) -> None:
    two.backward(scaler, math.inf)
    assert two.only.grad is not None
    two.only.grad.fill_(1024.0)
    for optimizer in (two.first, two.second):
        scaler.step(optimizer)
        assert scaler.last_step_skipped(optimizer)


def test_zero_grad_to_none_between_them(scaler: GradScaler, two: Two) -> None:
    two.backward(scaler)
    scaler.step(two.first)
    two.first.zero_grad(set_to_none=True)
    two.backward(scaler)
    scaler.unscale_(two.second)
    assert two.grads() == [[3.0, 3.0], [2.0, 2.0]]


def test_change_between_them_is_refused_untouched(scaler: GradScaler, two: Two) -> None:
    two.backward(scaler)
    scaler.unscale_(two.first)
    torch.nn.utils.clip_grad_norm_([two.shared], 0.1)
    before = two.grads()
    with pytest.raises(ScalerUsageError, match=r"'shared' of group 0.*another optimizer"):
        scaler.unscale_(two.second)
    assert two.grads() == before


def test_zeroed_and_accumulated_in_place_is_refused(scaler: GradScaler, two: Two) -> None:
    two.backward(scaler)
    scaler.step(two.first)
    two.first.zero_grad(set_to_none=False)
    two.backward(scaler)
    with pytest.raises(ScalerUsageError, match="changed since"):
        scaler.step(two.second)


def test_clip_after_both(scaler: GradScaler, two: Two) -> None:
    two.backward(scaler)
    scaler.unscale_(two.first)
    scaler.unscale_(two.second)
    torch.nn.utils.clip_grad_norm_([two.shared, two.only], 0.1)
    scaler.step(two.first)
    scaler.step(two.second)
    assert not scaler.last_step_skipped(two.second)


def test_fused_after_plain(scaler: GradScaler) -> None:
    two = Two(fused=True)
    two.backward(scaler)
    scaler.step(two.first)
    scaler.step(two.second)
    scaler.update()
    assert torch.allclose(two.shared, torch.full((2,), 0.4))
    assert torch.allclose(two.only, torch.full((2,), 0.9))


def test_plain_after_fused_is_refused(scaler: GradScaler) -> None:
    two = Two(fused=True)
    two.backward(scaler)
    scaler.step(two.second)
    with pytest.raises(ScalerUsageError, match="may have been unscaled"):
        scaler.step(two.first)


def test_optimizers_without_common_parameters(scaler: GradScaler, weights: Any, run_backward: Any) -> None:
    optimizers = [SGD([w], lr=0.5) for w in weights]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        run_backward(scaler, weights)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert torch.equal(weights[0], torch.full((3,), -0.5))


def test_gradients_are_not_held_past_the_update(scaler: GradScaler, weights: Any, run_backward: Any) -> None:
    optimizer = SGD(weights, lr=0.5)
    run_backward(scaler, weights)
    reference = weakref.ref(weights[0].grad.untyped_storage())
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    gc.collect()
    assert reference() is None


def test_gradients_of_optimizers_that_share_none_are_freed_before_the_update(
    scaler: GradScaler, weights: Any, run_backward: Any
) -> None:
    optimizers = [SGD([w], lr=0.5) for w in weights]
    for is_first in (True, False):
        run_backward(scaler, weights)
        reference = weakref.ref(weights[0].grad.untyped_storage())
        scaler.step(optimizers[0])
        optimizers[0].zero_grad()
        gc.collect()
        assert (reference() is None) is not is_first
        scaler.step(optimizers[1])
        scaler.update()


def test_sharing_that_comes_later_is_refused_once(scaler: GradScaler, weights: Any, run_backward: Any) -> None:
    optimizers = [SGD([w], lr=0.5) for w in weights]
    late = SGD([weights[0]], lr=0.5)

    def train(*used: Any) -> None:
        for optimizer in used:
            optimizer.zero_grad()
        run_backward(scaler, weights)
        for optimizer in used:
            scaler.step(optimizer)

    train(*optimizers)
    scaler.update()
    with pytest.raises(ScalerUsageError, match="may have been unscaled"):
        train(*optimizers, late)
    scaler.update()
    train(*optimizers, late)
    scaler.update()
    assert weights[0].grad.tolist() == [1.0, 1.0, 1.0]
