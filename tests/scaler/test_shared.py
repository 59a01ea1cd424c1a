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


def test_change_between_them_is_the_users(scaler: GradScaler, two: Two) -> None:
    two.backward(scaler)
    scaler.unscale_(two.first)
    torch.nn.utils.clip_grad_norm_([two.shared], 0.1)
    clipped = two.grads()[0]
    scaler.unscale_(two.second)
    assert two.grads() == [clipped, UNSCALED[1]]
    assert 0.0 < clipped[0] < 0.1


def test_zeroed_and_filled_in_place(scaler: GradScaler, two: Two) -> None:
    two.backward(scaler)
    scaler.step(two.first)
    two.second.zero_grad(set_to_none=False)
    two.backward(scaler, 2.0)
    scaler.step(two.second)
    assert two.grads() == [[6.0, 6.0], [2.0, 2.0]]


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


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=["fused", "foreach"])
@pytest.mark.parametrize("is_skipped", [False, True])
def test_any_after_fused(scaler: GradScaler, options: dict[str, bool], is_skipped: bool) -> None:
    two = Two(fused=True)
    last = SGD([two.shared], lr=0.1, **options)
    two.backward(scaler)
    if is_skipped:
        assert two.only.grad is not None
        two.only.grad.fill_(math.inf)
    scaler.step(two.second)
    scaler.step(last)
    assert scaler.last_step_skipped(two.second) is is_skipped
    assert not scaler.last_step_skipped(last)
    assert two.grads()[0] == UNSCALED[0]
    assert torch.allclose(two.shared, torch.full((2,), 0.7 if is_skipped else 0.4))


def test_after_a_fused_optimizer_of_others_it_is_refused(scaler: GradScaler, two: Two) -> None:
    class Fused(SGD):
        """Whether its kernel writes unscaled gradients back is its own affair."""

        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    first = Fused([two.shared], lr=0.1, fused=True)
    two.backward(scaler)
    scaler.step(first)
    before = two.grads()
    with pytest.raises(ScalerUsageError, match=r"'shared' of group 0.*can't be known"):
        scaler.step(two.second)
    assert two.grads() == before


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


def test_gradients_are_freed_before_the_update(scaler: GradScaler, weights: Any, run_backward: Any) -> None:
    optimizers = [SGD([w], lr=0.5) for w in weights]
    run_backward(scaler, weights)
    reference = weakref.ref(weights[0].grad.untyped_storage())
    scaler.step(optimizers[0])
    optimizers[0].zero_grad()
    gc.collect()
    assert reference() is None


def test_sharing_that_comes_later(scaler: GradScaler, weights: Any, run_backward: Any) -> None:
    optimizers = [SGD([w], lr=0.5) for w in weights]
    late = SGD([weights[0]], lr=0.5)
    for used in (optimizers, [*optimizers, late]):
        for optimizer in used:
            optimizer.zero_grad()
        run_backward(scaler, weights)
        for optimizer in used:
            scaler.step(optimizer)
        scaler.update()
        assert weights[0].grad.tolist() == [1.0, 1.0, 1.0]


def test_group_that_comes_later(scaler: GradScaler, weights: Any, run_backward: Any) -> None:
    first, second = (SGD([w], lr=0.5) for w in weights)
    for number in range(3):
        if number == 2:
            first.add_param_group({"params": [weights[1]]})
        second.zero_grad()
        first.zero_grad()
        run_backward(scaler, weights)
        for optimizer in (first, second):
            scaler.unscale_(optimizer)
            assert optimizer.param_groups[-1]["params"][0].grad.unique().tolist() == [1.0]
        scaler.step(first)
        scaler.step(second)
        scaler.update()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_that_are_views_of_one_buffer(scaler: GradScaler, flat: bool, fused: bool) -> None:
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(4)]
    buffer = torch.zeros(8)
    groups = [params[:2], params[2:3], params[1:2] + params[3:]]
    optimizers = [SGD(group, lr=0.1, fused=fused) for group in groups]
    for _ in range(3):
        buffer.zero_()
        for number, param in enumerate(params):
            param.grad = buffer[2 * number : 2 * number + 2] if flat else None
        scaler.scale(sum((p * (i + 1)).sum() for i, p in enumerate(params))).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    expected = [1 - 0.1 * 3 * (i + 1) * (2 if i == 1 else 1) for i in range(4)]
    assert torch.allclose(torch.stack([p[0] for p in params]), torch.tensor(expected))


def test_one_gradient_of_two_parameters(scaler: GradScaler, weights: Any) -> None:
    weight, other = weights[0], torch.nn.Parameter(torch.ones(3))
    scaler.scale(weight.sum()).backward()
    other.grad = weight.grad
    for param in (weight, other):
        scaler.step(SGD([param], lr=0.5))
    assert weight.tolist() == other.tolist() == [0.5, 0.5, 0.5]
