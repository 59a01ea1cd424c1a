"""Gradients that are part of a graph: what is derived from them is unscaled with them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mpamp.scaler import GradScaler

pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("has_kernels", [True, False])
def test_derivative_of_an_unscaled_gradient(
    dtype: torch.dtype, has_kernels: bool, request: pytest.FixtureRequest
) -> None:
    if not has_kernels:
        request.getfixturevalue("without_kernels")
    weight, plain = (torch.nn.Parameter(torch.ones(1, dtype=dtype)) for _ in range(2))
    optimizer = torch.optim.SGD([weight, plain], lr=0.5)
    scaler = GradScaler("cpu", init_scale=256.0, allow_fp16_grads=True)
    scaler.scale(((weight**3).sum() + plain.sum()).abs()).backward(create_graph=True)
    grad = weight.grad
    assert grad is not None
    scaler.unscale_(optimizer)
    assert weight.grad is grad
    assert grad.tolist() == [3.0]
    assert plain.grad is not None
    assert plain.grad.tolist() == [1.0]
    (second,) = torch.autograd.grad(grad.real.sum(), weight)
    assert second.tolist() == [6.0]


def test_penalty_on_unscaled_gradients() -> None:
    found = []
    for enabled in (True, False):
        weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        optimizer, scaler = torch.optim.SGD([weight], lr=0.5), GradScaler("cpu", enabled=enabled)
        scaler.scale((weight**3).sum()).backward(create_graph=True)
        scaler.unscale_(optimizer)
        penalty = weight.grad.square().sum()  # type: ignore[union-attr]
        optimizer.zero_grad()
        scaler.scale(penalty).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(weight.tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("factor", [1.0, math.inf])
def test_step_with_a_graph(options: dict[str, Any], factor: float) -> None:
    weight, coefficient = torch.nn.Parameter(torch.ones(2)), torch.tensor(3.0, requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight], lr=0.5, **options), GradScaler("cpu", init_scale=256.0)
    scaler.scale((weight * coefficient).sum() * factor).backward(create_graph=True)
    scaler.step(optimizer)
    assert scaler.last_step_skipped(optimizer) is (factor != 1.0)
    assert weight.tolist() == ([-0.5, -0.5] if factor == 1.0 else [1.0, 1.0])
    assert weight.grad is not None
    (derivative,) = torch.autograd.grad(weight.grad.sum(), coefficient)
    assert derivative.item() == 2.0 * factor


def test_graph_that_is_there_by_accident() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.5), GradScaler("cpu", init_scale=64.0)
    scaler.scale(weight.sum()).backward()
    weight.grad = weight.grad + 64.0 * weight  # type: ignore[operator]
    scaler.step(optimizer)
    assert weight.tolist() == [0.0, 0.0]


def test_through_a_differentiable_step() -> None:
    """The weights after the step, as functions of a learned loss factor, as meta-learning has it."""
    found = []
    for enabled in (True, False):
        factor = torch.tensor(2.0, requires_grad=True)
        weight = torch.ones(2, requires_grad=True).clone()
        weight.retain_grad()
        optimizer = torch.optim.SGD([weight], lr=0.5, differentiable=True)
        scaler = GradScaler("cpu", init_scale=64.0, enabled=enabled)
        scaler.scale((weight.square() * factor).sum()).backward(create_graph=True)
        scaler.step(optimizer)
        (derivative,) = torch.autograd.grad(weight.sum(), factor)
        found.append((weight.tolist(), derivative.item()))
    assert found[0] == found[1] == ([-1.0, -1.0], -2.0)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradient_with_a_graph(scaler: GradScaler) -> None:
    layer = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    scaler.scale(layer(torch.tensor([0, 1, 1])).sum()).backward()
    grad = layer.weight.grad
    assert grad is not None
    layer.weight.grad = grad * torch.ones((), requires_grad=True)
    scaler.unscale_(optimizer)
    assert layer.weight.grad.to_dense()[:, 0].tolist() == [1.0, 2.0, 0.0, 0.0]
