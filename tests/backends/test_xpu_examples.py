"""The examples of Intel's "Auto Mixed Precision (AMP)" page for GPUs, as they stand there but for the import.

On an XPU they run; elsewhere on fake tensors of one, all but the traced graph: the tracer takes none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mpamp
from mpamp.backends.cpu import amp as cpu_amp
from mpamp.backends.xpu import amp as xpu_amp
from tests.parity.observe import is_here

BRAIN, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
SHAPE, OUT = (64, 64, 224, 224), (64, 128, 112, 112)
PLACES = [
    pytest.param(
        "fake xpu",
        marks=pytest.mark.skipif(not is_here("fake xpu"), reason="beside another card, xpu tensors can't be faked"),
    ),
    pytest.param("xpu", marks=pytest.mark.accelerator),
]
on_both = pytest.mark.parametrize("place", PLACES, indirect=True)


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    """Make tensors of the device, fake ones where they are asked for."""
    with FakeTensorMode(allow_non_fake_inputs=True) if request.param != "xpu" else contextlib.nullcontext():
        yield request.param


class SimpleNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(64, 128, (3, 3), stride=(2, 2), padding=(1, 1), bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


@on_both
def test_default_precision(place: str) -> None:
    model = SimpleNet().to("xpu")
    x = torch.rand(*SHAPE).to("xpu")
    y = model(x)
    assert (y.dtype, y.shape, y.device.type) == (FULL, OUT, "xpu")


@on_both
def test_inference_with_imperative_path(place: str) -> None:
    model = SimpleNet().to("xpu").eval()
    x = torch.rand(*SHAPE).to("xpu")
    with xpu_amp.autocast(dtype=HALF):
        y = model(x)
    assert (y.dtype, y.shape) == (HALF, OUT)
    assert model.conv.weight.dtype is FULL
    assert model(x).dtype is FULL  # nothing is left of the region


@pytest.mark.parametrize(
    ("place", "amp"),
    [
        pytest.param("xpu", xpu_amp, marks=pytest.mark.accelerator),
        pytest.param("cpu", cpu_amp),  # the tracer takes no fake tensors, so without an XPU this has to do
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_inference_with_torchscript_path(place: str, amp: Any) -> None:
    model: Any = SimpleNet().to(place).eval()
    x = torch.rand(*SHAPE).to(place)
    with amp.autocast(dtype=HALF):
        model = torch.jit.trace(model, x)
        model = torch.jit.freeze(model)
        y = model(x)
    assert (y.dtype, y.shape) == (HALF, OUT)
    assert model(x).dtype is HALF  # the casts are in the graph


@on_both
def test_training_support(place: str) -> None:
    model = SimpleNet().to("xpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    criterion = torch.nn.MSELoss()
    dtypes = []
    before = model.conv.weight.detach().clone()
    for _ in range(2):
        images, label = torch.rand(2, 64, 32, 32), torch.rand(2, 128, 16, 16)
        with xpu_amp.autocast():
            y = model(images.to("xpu"))
            loss = criterion(y, label.to("xpu"))
        dtypes.append((y.dtype, loss.dtype))
        loss.backward()
        grad = model.conv.weight.grad
        assert grad is not None
        assert (grad.dtype, model.conv.weight.dtype) == (FULL, FULL)
        optimizer.step()
        optimizer.zero_grad()
    assert dtypes == [(BRAIN, FULL)] * 2
    if place == "xpu":
        assert not torch.equal(before, model.conv.weight)


@on_both
def test_the_same_with_mpamps_own_names(place: str) -> None:
    model = SimpleNet().to("xpu")
    x = torch.rand(2, 64, 8, 8, device="xpu")
    with mpamp.autocast("xpu"):
        assert model(x).dtype is BRAIN
    with mpamp.autocast("xpu", dtype=HALF), torch.no_grad():
        assert model(x).dtype is HALF
