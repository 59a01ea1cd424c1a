"""The device itself: values, strides, views and gradients are the processor's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import mpamp


@pytest.fixture(autouse=True)
def _device() -> None:
    mpamp.get_backend("npy")


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "select": lambda x: x[1],
    "transpose": lambda x: x.transpose(0, 2),
    "select of transpose": lambda x: x.transpose(0, 2)[1],
    "slice, then select": lambda x: x[:, 1:][1, 0],
    "expand": lambda x: x[0].expand(5, 3, 4),
    "reshape of permute": lambda x: x.permute(2, 0, 1).reshape(-1),
    "contiguous of transpose": lambda x: x.transpose(1, 2)[..., 1:].contiguous(),
    "sum of steps": lambda x: x[..., ::2].sum(0),
    "stack of unbind": lambda x: torch.stack(x.unbind(1)),
    "unflatten": lambda x: x.transpose(1, 2).unflatten(1, (2, 2))[:, 1],
    "abs": lambda x: (x - 5).abs(),
    "mse_loss": lambda x: F.mse_loss(x, x + 1),
    "smooth_l1_loss, of each": lambda x: F.smooth_l1_loss(x, x + 1, reduction="none"),
    "topk": lambda x: x.topk(2).values,
    "isfinite": lambda x: (x / 0).isfinite(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_values_and_strides(name: str) -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    expected, found = VIEWS[name](x), VIEWS[name](x.to("npy"))
    assert found.device == torch.device("npy", 0)
    assert torch.equal(found.cpu(), expected)
    assert found.stride() == expected.stride()


def test_resizing() -> None:
    x, out = torch.arange(4.0).to("npy"), torch.empty(0).to("npy")
    torch.add(x, 1, out=out)
    assert out.tolist() == [1, 2, 3, 4]
    x.resize_(2, 1)
    assert x.shape == (2, 1)


def test_writing_through_views() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    y = x.to("npy")
    for each in (x, y):
        each[:, 0] = 7
        each.transpose(0, 2)[1].zero_()
        each[1, 1:].add_(1)
    assert torch.equal(y.cpu(), x)


def test_gradients() -> None:
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(4, 3), torch.randn(2, 5, 4)
    found = []
    for device in ("cpu", "npy"):
        layer.to(device).zero_grad()
        y = x.clone().to(device).requires_grad_()
        layer(y).transpose(1, 2).softmax(1).square().sum().backward()
        assert y.grad is not None
        assert layer.weight.grad is not None
        found.append((y.grad.cpu(), layer.weight.grad.cpu()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_tensor_prints() -> None:
    assert repr(torch.arange(3).to("npy")) == "tensor([0, 1, 2], device='npy:0')"
