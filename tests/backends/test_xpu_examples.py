"""The examples of Intel's "Auto Mixed Precision (AMP)" page for GPUs, as they stand there but for the import.

On an XPU they run; elsewhere on fake tensors of one, all but traced graphs and training: those run on the
processor there, as without a card torch records no graph of tensors on it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mpamp.backends.cpu import amp as cpu_amp
from mpamp.backends.xpu import amp as xpu_amp
from tests.parity.observe import is_here, tensors_at

BRAIN, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
SHAPE, OUT = (64, 64, 224, 224), (64, 128, 112, 112)
ON_XPU = pytest.param("xpu", xpu_amp, marks=pytest.mark.accelerator)
ON_CPU = pytest.param("cpu", cpu_amp)
"""Where there is no XPU, what fake tensors of one can't do is done with the processor's namespace."""
EVERYWHERE = [
    ON_XPU,
    pytest.param(
        "fake xpu",
        xpu_amp,
        marks=pytest.mark.skipif(not is_here("fake xpu"), reason="beside another card, xpu tensors can't be faked"),
    ),
]


class SimpleNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(64, 128, (3, 3), stride=(2, 2), padding=(1, 1), bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


def model_and_input(place: str) -> tuple[SimpleNet, torch.Tensor]:
    """Return what every example starts with."""
    model = SimpleNet()
    if place == "cpu":
        return model, torch.rand(1, *SHAPE[1:])  # in float16, 64 images take a processor minutes
    if place == "xpu":
        return model.to(place), torch.rand(*SHAPE).to(place)
    # Without a card no tensor, a fake one neither, can be moved to it, and no autograd graph be recorded there.
    weight = torch.empty(model.conv.weight.shape, device="xpu")
    model.conv.weight = torch.nn.Parameter(weight, requires_grad=False)
    return model, torch.empty(*SHAPE, device="xpu")


@pytest.mark.parametrize(("place", "amp"), EVERYWHERE)
def test_default_precision(place: str, amp: Any) -> None:
    with tensors_at(place):
        model, x = model_and_input(place)
        y = model(x)
    assert (y.dtype, y.shape, y.device.type) == (FULL, OUT, "xpu")


@pytest.mark.parametrize(("place", "amp"), EVERYWHERE)
def test_inference_with_imperative_path(place: str, amp: Any) -> None:
    with tensors_at(place):
        model, x = model_and_input(place)
        model.eval()
        with amp.autocast(dtype=HALF):
            y = model(x)
        assert (y.dtype, y.shape, y.device.type) == (HALF, OUT, "xpu")
        assert model.conv.weight.dtype is FULL
        assert model(x).dtype is FULL  # nothing is left of the region


@pytest.mark.slow
@pytest.mark.parametrize(("place", "amp"), [ON_XPU, ON_CPU])
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_inference_with_torchscript_path(place: str, amp: Any) -> None:
    model: Any
    model, x = model_and_input(place)
    model.eval()
    with amp.autocast(dtype=HALF):
        model = torch.jit.trace(model, x)
        model = torch.jit.freeze(model)
        y = model(x)
    assert (y.dtype, y.shape[1:]) == (HALF, OUT[1:])
    assert model(x).dtype is HALF  # the casts are in the graph


@pytest.mark.parametrize(("place", "amp"), [ON_XPU, ON_CPU])
def test_training_support(place: str, amp: Any) -> None:
    model, _ = model_and_input(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    criterion = torch.nn.MSELoss()
    before = model.conv.weight.detach().clone()
    for _ in range(2):
        images, label = torch.rand(2, 64, 32, 32), torch.rand(2, 128, 16, 16)
        with amp.autocast():
            y = model(images.to(place))
            loss = criterion(y, label.to(place))
        assert (y.dtype, loss.dtype) == (BRAIN, FULL)
        optimizer.zero_grad()
        loss.backward()
        grad = model.conv.weight.grad
        assert grad is not None
        assert (grad.dtype, model.conv.weight.dtype) == (FULL, FULL)
        optimizer.step()
    assert not torch.equal(before, model.conv.weight)


@pytest.mark.parametrize(("place", "amp"), EVERYWHERE)
def test_training_is_in_bfloat16_by_default(place: str, amp: Any) -> None:
    with tensors_at(place):
        model, x = model_and_input(place)
        with amp.autocast():
            y = model(x)
            loss = torch.nn.functional.mse_loss(y, torch.empty(*OUT, device="xpu"))
        assert (y.dtype, loss.dtype) == (BRAIN, FULL)
