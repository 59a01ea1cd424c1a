"""Gradients that come, or are changed or replaced, after ``unscale_``: each is unscaled once, or the scaler says no."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mpamp.errors import ScalerUsageError
from mpamp.scaler import GradScaler

MAKES = {
    "plain": lambda p: torch.optim.SGD(p, lr=0.5, foreach=False),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.5, foreach=True),
    "fused": lambda p: torch.optim.SGD(p, lr=0.5, fused=True),
}
every_optimizer = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


class Trained:
    """One weight with the gradient 3, unscaled; and ways to go on."""

    def __init__(self, make: Any = MAKES["plain"], *, enabled: bool = True) -> None:
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.optimizer = make([self.weight])
        self.scaler = GradScaler("cpu", init_scale=64.0, enabled=enabled)
        self.backward(3.0)
        self.scaler.unscale_(self.optimizer)

    def backward(self, factor: float) -> None:
        self.scaler.scale((self.weight * factor).sum()).backward()

    @property
    def grad(self) -> Any:
        return self.weight.grad

    def step(self) -> list[float]:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return [1 - w for w in self.weight.tolist()]


def accumulated(t: Trained) -> None:
    t.backward(1.0)


def zeroed_to_none(t: Trained) -> None:
    t.optimizer.zero_grad(set_to_none=True)
    t.backward(1.0)


def zeroed_in_place(t: Trained) -> None:
    t.optimizer.zero_grad(set_to_none=False)
    t.backward(1.0)


def clipped_then_accumulated(t: Trained) -> None:
    torch.nn.utils.clip_grad_value_([t.weight], 1.0)
    t.backward(1.0)


def replaced_then_accumulated(t: Trained) -> None:
    t.weight.grad = t.grad.clamp(max=2.0)
    t.backward(1.0)


def three_passes(t: Trained) -> None:
    for _ in range(2):
        t.backward(1.0)
    t.optimizer.zero_grad()
    t.backward(1.0)


def unscaled_loss(t: Trained) -> None:
    """A regularizer whose loss isn't scaled: its gradient fits to the unscaled ones."""
    (t.weight * 0.5).sum().backward()


def scaled_and_unscaled_losses(t: Trained) -> None:
    unscaled_loss(t)
    t.backward(1.0)
    t.scaler.unscale_(t.optimizer)
    unscaled_loss(t)


def other_loss(t: Trained) -> None:
    """A pass that doesn't reach the weight, and then a clip of it."""
    t.scaler.scale(torch.nn.Parameter(torch.ones(2)).sum()).backward()
    torch.nn.utils.clip_grad_value_([t.weight], 1.0)


def replaced(t: Trained) -> None:
    t.weight.grad = t.grad.clamp(max=2.0)


def copied(t: Trained) -> None:
    t.grad.copy_(torch.full((2,), 0.25))


def multiplied(t: Trained) -> None:
    t.grad.mul_(0.5)


def penalty(t: Trained) -> None:
    """A gradient by ``torch.autograd.grad``, which leaves the weight's alone."""
    (grad,) = torch.autograd.grad(t.scaler.scale((t.weight * 2).sum()), t.weight)
    t.grad.add_(grad / t.scaler.get_scale())


def retained(t: Trained) -> None:
    """A second pass from one scaled loss: ``scale`` is not called between."""
    loss = t.scaler.scale((t.weight * 1.0).sum())
    loss.backward(retain_graph=True)
    t.scaler.unscale_(t.optimizer)
    t.optimizer.zero_grad()
    loss.backward()


def scaled_before(t: Trained) -> None:
    """Both losses are scaled at once, and go backward one by one."""
    first, second = t.scaler.scale([(t.weight * 1.0).sum(), (t.weight * 2.0).sum()])
    first.backward()
    t.scaler.unscale_(t.optimizer)
    second.backward()


def reentrant(t: Trained) -> None:
    """A backward pass within the backward pass."""
    x = torch.ones(2, requires_grad=True)
    t.scaler.scale(checkpoint(lambda x: t.weight * x, x, use_reentrant=True).sum()).backward()


def graph_of_gradients(t: Trained) -> None:
    """The sum is another tensor here, not the one that was unscaled."""
    t.scaler.scale((t.weight * 1.0).sum()).backward(create_graph=True)


def one_gradient_for_two(t: Trained) -> None:
    other = torch.nn.Parameter(torch.ones(2))
    other.grad = t.grad
    t.backward(1.0)
    t.scaler.unscale_(torch.optim.SGD([other], lr=0.5))


WAYS = [
    accumulated,
    zeroed_to_none,
    zeroed_in_place,
    clipped_then_accumulated,
    replaced_then_accumulated,
    three_passes,
    unscaled_loss,
    scaled_and_unscaled_losses,
    other_loss,
    replaced,
    copied,
    multiplied,
    penalty,
    retained,
    scaled_before,
    reentrant,
    graph_of_gradients,
    one_gradient_for_two,
]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
quiet = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")


@quiet
@every_way
@every_optimizer
def test_step_is_by_true_gradients(make: Any, way: Any) -> None:
    found = []
    for enabled in (True, False):
        trained = Trained(make, enabled=enabled)
        way(trained)
        found.append(trained.step())
        trained.optimizer.zero_grad()
        trained.backward(1.0)  # the next iteration starts afresh
        found[-1] += trained.step()
    assert found[0] == found[1]


@quiet
@every_way
@every_optimizer
def test_step_of_another_optimizer_is_by_true_gradients(make: Any, way: Any) -> None:
    found = []
    for enabled in (True, False):
        trained = Trained(make, enabled=enabled)
        way(trained)
        trained.optimizer = MAKES["plain"]([trained.weight])
        found.append(trained.step())
    assert found[0] == found[1]


@pytest.mark.parametrize("way", [accumulated, zeroed_to_none, zeroed_in_place, replaced_then_accumulated])
@every_optimizer
def test_inf_that_comes_later_skips(make: Any, way: Any) -> None:
    trained = Trained(make)
    way(trained)
    trained.backward(math.inf)
    assert trained.step() == [0.0, 0.0]
    assert trained.scaler.last_step_skipped(trained.optimizer)
    assert trained.scaler.get_scale() == 32.0


@every_optimizer
def test_inf_that_was_there_before_skips_though_it_is_gone(make: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = make([weight]), GradScaler("cpu", init_scale=64.0)
    for factor in (math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert scaler.last_step_skipped(optimizer)
    assert weight.tolist() == [1.0, 1.0]


def test_inf_that_came_later_and_was_unscaled_with_another_optimizer() -> None:
    trained = Trained()
    trained.backward(math.nan)
    other = MAKES["plain"]([trained.weight])
    trained.scaler.unscale_(other)
    assert trained.step() == [0.0, 0.0]


def test_second_unscale_is_for_what_came_between() -> None:
    trained = Trained()
    trained.backward(1.0)
    trained.scaler.unscale_(trained.optimizer)
    assert trained.grad.tolist() == [4.0, 4.0]
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        trained.scaler.unscale_(trained.optimizer)


def assign(trained: Trained) -> None:
    loss = trained.scaler.scale((trained.weight * 1.0).sum())
    (trained.weight.grad,) = torch.autograd.grad(loss, trained.weight)


def test_assigned_after_another_pass_is_refused_untouched() -> None:
    trained = Trained()
    assign(trained)
    with pytest.raises(ScalerUsageError, match=r"parameter 0 of group 0.*zero_grad\(set_to_none=True\)"):
        trained.scaler.step(trained.optimizer)
    assert trained.grad.tolist() == [64.0, 64.0]
    assert trained.weight.tolist() == [1.0, 1.0]


@every_optimizer
def test_assigned_in_the_place_of_none(make: Any) -> None:
    trained = Trained(make)
    trained.optimizer.zero_grad()
    assign(trained)
    assert trained.step() == [0.5, 0.5]


def test_parameter_without_gradient_until_later() -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer, scaler = torch.optim.SGD(weights, lr=0.5), GradScaler("cpu", init_scale=64.0)
    scaler.scale(weights[0].sum()).backward()
    scaler.unscale_(optimizer)
    scaler.scale(weights[1].sum()).backward()
    scaler.step(optimizer)
    assert [w.tolist() for w in weights] == [[0.5, 0.5]] * 2


def test_group_added_after_unscaling() -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer, scaler = torch.optim.SGD(weights[:1], lr=0.5), GradScaler("cpu", init_scale=64.0)
    scaler.scale(sum(w.sum() for w in weights)).backward()
    scaler.unscale_(optimizer)
    optimizer.add_param_group({"params": weights[1:]})
    scaler.step(optimizer)
    assert [w.tolist() for w in weights] == [[0.5, 0.5]] * 2


@pytest.mark.parametrize("clips", [False, True])
@every_optimizer
def test_optimizers_that_step_in_the_backward_pass(make: Any, clips: bool) -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizers = {w: make([w]) for w in weights}
    scaler = GradScaler("cpu", init_scale=64.0)

    def step(weight: Any) -> None:
        if clips:
            scaler.unscale_(optimizers[weight])
            weight.grad = weight.grad.clamp(max=1.0)
        scaler.step(optimizers[weight])
        optimizers[weight].zero_grad()

    for weight in weights:
        weight.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        scaler.scale(sum((w * 2).sum() for w in weights)).backward()
        scaler.update()
    assert [w.tolist() for w in weights] == [[0.0, 0.0] if clips else [-1.0, -1.0]] * 3


def test_unscaling_in_the_backward_pass_before_the_last_gradient() -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer, scaler = torch.optim.SGD(weights, lr=0.5), GradScaler("cpu", init_scale=64.0)
    hidden = weights[0] * 1.0
    hidden.register_hook(lambda grad: scaler.unscale_(optimizer))
    scaler.scale((hidden * weights[1].detach()).sum()).backward()
    scaler.step(optimizer)
    assert weights[0].tolist() == [0.5, 0.5]


def test_two_optimizers_in_turn_without_updates() -> None:
    """As for a generator and a discriminator: each one's pass comes after the other's unscaling."""
    found = []
    for enabled in (True, False):
        first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
        optimizers = [torch.optim.SGD([w], lr=0.5) for w in (first, second)]
        scaler = GradScaler("cpu", init_scale=64.0, enabled=enabled)
        for _ in range(3):
            for optimizer, loss in zip(optimizers, (first * 2, first.detach() * second), strict=True):
                optimizer.zero_grad()
                scaler.scale(loss.sum()).backward()
                scaler.unscale_(optimizer)
            for optimizer, weight in zip(optimizers, (first, second), strict=True):
                torch.nn.utils.clip_grad_norm_([weight], 1.0)
                scaler.step(optimizer)
            scaler.update()
        found.append([first.tolist(), second.tolist()])
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_accumulated_gradients_of_other_dtypes(dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.ones(2, dtype=dtype))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.25), GradScaler("cpu", init_scale=64.0, allow_fp16_grads=True)
    for _ in range(2):
        scaler.scale(weight.sum().real.float() if dtype.is_complex else weight.sum()).backward()
        scaler.unscale_(optimizer)
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full_like(weight, 2.0))
    scaler.step(optimizer)
    assert torch.equal(weight, torch.full_like(weight, 0.5))


@pytest.mark.parametrize("zeroes", [None, True, False])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients(zeroes: bool | None) -> None:
    found = []
    for enabled in (True, False):
        torch.manual_seed(0)
        layer = torch.nn.Embedding(4, 2, sparse=True)
        optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=0.5), GradScaler("cpu", enabled=enabled)
        for rows in ([0, 1, 1], [1, 2]):
            scaler.scale(layer(torch.tensor(rows)).sum()).backward()
            scaler.unscale_(optimizer)
            if zeroes is not None and rows[0] == 0:
                optimizer.zero_grad(set_to_none=zeroes)
        scaler.step(optimizer)
        found.append(layer.weight.tolist())
    assert found[0] == found[1]


def test_no_hook_is_left_after_the_update() -> None:
    trained = Trained()
    trained.backward(1.0)
    hooks = trained.weight._post_accumulate_grad_hooks
    assert len(hooks) == 1
    trained.step()
    assert hooks == {}
    trained.backward(1.0)
    assert hooks == {}
    copy.deepcopy(trained.weight)


def test_no_hook_where_nothing_comes_after_unscaling() -> None:
    trained = Trained()
    trained.step()
    for _ in range(2):
        trained.backward(1.0)
    trained.scaler.unscale_(trained.optimizer)
    assert trained.weight._post_accumulate_grad_hooks is None


def test_a_dropped_scaler_is_freed() -> None:
    trained = Trained()
    trained.backward(1.0)
    references = [weakref.ref(trained.scaler), weakref.ref(trained.weight), weakref.ref(trained.optimizer)]
    del trained
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_a_failed_pass_is_forgotten_at_the_update() -> None:
    trained = Trained()
    loss = trained.scaler.scale((trained.weight * 1.0).sum())
    handle = trained.weight.register_hook(lambda grad: pytest.fail("as asked"))
    with pytest.raises(pytest.fail.Exception):
        loss.backward()
    handle.remove()
    trained.step()
    trained.scaler.unscale_(trained.optimizer)
    unscaled_loss(trained)
    assert trained.grad.tolist() == [3 / 64 + 0.5] * 2


@every_optimizer
def test_a_scaler_says_whether_gradients_are_unscaled(make: Any) -> None:
    t = Trained(make)
    assert t.scaler.is_unscaled(t.optimizer)
    t.backward(1.0)
    assert not t.scaler.is_unscaled(t.optimizer)
    t.scaler.unscale_(t.optimizer)
    assert t.scaler.is_unscaled(t.optimizer)
    t.step()
    assert not t.scaler.is_unscaled(t.optimizer)
    assert not Trained(make, enabled=False).scaler.is_unscaled(t.optimizer)
