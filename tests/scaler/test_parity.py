"""The same calls give the same weights, scales and errors as torch's scaler, wherever torch's is no fault."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpamp.scaler import GradScaler

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}

Scaler = torch.amp.GradScaler
iterations = st.lists(
    st.tuples(st.sampled_from([1.0, 1.0, 1.0, math.inf, math.nan, 1e-3]), st.sampled_from(["step", "unscale", "clip"])),
    max_size=8,
)


def train(scaler: Scaler, make: Any, steps: Any, dtype: torch.dtype) -> list[Any]:
    weights = [torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=dtype)) for _ in range(3)]
    optimizer = make(weights[:2])
    seen: list[Any] = []
    for factor, how in steps:
        optimizer.zero_grad()
        scaler.scale((weights[0] * weights[1]).sum().float() * factor).backward()
        if how != "step":
            scaler.unscale_(optimizer)
        if how == "clip":
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
        seen.append(scaler.step(optimizer))
        scaler.update()
        seen += [scaler.get_scale(), scaler._get_growth_tracker(), *[w.tolist() for w in weights]]
    return seen


@pytest.mark.parametrize("name", OPTIMIZERS)
@given(iterations, st.integers(1, 3), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
@settings(max_examples=25, deadline=None)
def test_training_is_torchs(name: str, steps: Any, interval: int, dtype: torch.dtype) -> None:
    arguments = {"init_scale": 64.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": interval}
    ours = train(GradScaler("cpu", **arguments), OPTIMIZERS[name], steps, dtype)
    torchs = train(Scaler("cpu", **arguments), OPTIMIZERS[name], steps, dtype)
    assert repr(ours) == repr(torchs)


def misuse_unscale_twice(scaler: Scaler, optimizer: Any, loss: Any) -> None:
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def misuse_unscale_after_step(scaler: Scaler, optimizer: Any, loss: Any) -> None:
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.unscale_(optimizer)


def misuse_step_twice(scaler: Scaler, optimizer: Any, loss: Any) -> None:
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.step(optimizer)


def misuse_unscale_first(scaler: Scaler, optimizer: Any, loss: Any) -> None:
    scaler.unscale_(optimizer)


def misuse_step_first(scaler: Scaler, optimizer: Any, loss: Any) -> None:
    scaler.step(optimizer)


def misuse_update_first(scaler: Scaler, optimizer: Any, loss: Any) -> None:
    scaler.update()


def misuse_update_without_checks(scaler: Scaler, optimizer: Any, loss: Any) -> None:
    scaler.scale(loss)
    scaler.update()


def misuse_two_element_scale(scaler: Scaler, optimizer: Any, loss: Any) -> None:
    scaler.scale(loss)
    scaler.update(torch.ones(2))


def misuse_scale_that_requires_grad(scaler: Scaler, optimizer: Any, loss: Any) -> None:
    scaler.scale(loss)
    scaler.update(torch.ones((), requires_grad=True))


def misuse_scale_elsewhere(scaler: Scaler, optimizer: Any, loss: Any) -> None:
    scaler.scale(loss)
    scaler.update(torch.ones((), device="meta"))


MISUSES = [value for name, value in list(globals().items()) if name.startswith("misuse_")]


@pytest.mark.parametrize("misuse", MISUSES, ids=lambda f: f.__name__)
def test_misuse_is_the_same_error(misuse: Any) -> None:
    caught = []
    for make in (Scaler, GradScaler):
        weight = torch.nn.Parameter(torch.ones(2))
        with pytest.raises((RuntimeError, AssertionError)) as info:
            misuse(make("cpu"), torch.optim.SGD([weight], lr=0.1), weight.sum())
        caught.append((info.type, " ".join(str(info.value).split()).split(". ")[0].rstrip(".")))
    assert caught[0] == caught[1]


@pytest.mark.parametrize("new_scale", [8.0, torch.tensor(8.0)], ids=["float", "tensor"])
def test_new_scale_is_torchs(new_scale: Any) -> None:
    seen = []
    for make in (Scaler, GradScaler):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler = make("cpu")
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update(new_scale)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.state_dict(), weight.tolist()))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("new_scale", [8, torch.full((1,), 8.0), torch.tensor(8.0, dtype=torch.float64)], ids=repr)
def test_new_scale_may_be_an_int_and_one_dimensional(scaler: GradScaler, new_scale: Any) -> None:
    scaler.scale(torch.ones(()))
    scaler.update(new_scale)
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("new_scale", [0.0, -1.0, math.nan, math.inf, "8", True, 2.0**127, 2.0**-20], ids=repr)
def test_bad_new_scale_is_named_and_changes_nothing(scaler: GradScaler, new_scale: Any) -> None:
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="new_scale"):
        scaler.update(new_scale)
    assert scaler.get_scale() == 1024.0


@pytest.mark.parametrize(("value", "scale"), [(math.inf, 4096.0), (0.0, 2.0), (-1.0, 2.0), (math.nan, 1024.0)])
def test_new_scale_in_a_tensor_cannot_break_the_scale(value: float, scale: float) -> None:
    scaler = GradScaler("cpu", init_scale=1024.0, min_scale=2.0, max_scale=4096.0)
    scaler.scale(torch.ones(()))
    scaler.update(torch.tensor(value))
    assert scaler.get_scale() == scale


def test_one_optimizers_inf_skips_its_step_only(scaler: GradScaler, weights: Any, run_backward: Any) -> None:
    good, bad = (torch.optim.SGD([w], lr=0.5) for w in weights)
    run_backward(scaler, weights[:1])
    run_backward(scaler, weights[1:], factor=math.inf)
    scaler.step(good)
    scaler.step(bad)
    scaler.update()
    assert torch.equal(weights[0], torch.full((3,), 0.5))
    assert torch.equal(weights[1], torch.ones(2, 2))
    assert scaler.get_scale() == 512.0
    assert [scaler.last_step_skipped(o) for o in (good, bad)] == [False, True]


def test_gradient_penalty(scaler: GradScaler) -> None:
    def penalised(scaler: Any) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        loss = weight.pow(3).sum()
        (grad,) = torch.autograd.grad(scaler.scale(loss), weight, create_graph=True)
        penalty = (grad / scaler.get_scale()).norm()
        scaler.scale(loss + penalty).backward()
        scaler.step(optimizer)
        scaler.update()
        return weight.detach()

    assert torch.allclose(penalised(scaler), penalised(GradScaler("cpu", enabled=False)))


def test_gradient_accumulation_and_several_losses(scaler: GradScaler, weights: Any, run_backward: Any) -> None:
    optimizer = torch.optim.SGD(weights, lr=0.1)
    for losses in (scaler.scale([w.sum() for w in weights]), scaler.scale([w.sum() for w in weights])):
        for loss in losses:
            loss.backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.allclose(weights[1], torch.full((2, 2), 0.8))


def test_optimizers_own_return_value(scaler: GradScaler, weights: Any, run_backward: Any) -> None:
    class Answering(torch.optim.SGD):
        def step(self, closure: Any = None, *, extra: int = 0) -> Any:
            super().step()
            return 42 + extra

    optimizer = Answering(weights, lr=0.1)
    run_backward(scaler, weights)
    assert scaler.step(optimizer, extra=1) == 43
    scaler.update()
    run_backward(scaler, weights, factor=math.nan)
    assert scaler.step(optimizer, extra=1) is None
