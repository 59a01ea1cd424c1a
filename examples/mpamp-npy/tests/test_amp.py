"""Mixed precision on npy: regions, the scaler, training, checkpointing, custom functions."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from mpamp_npy import device
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import mpamp

BRAIN, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
pytestmark = pytest.mark.usefixtures("npy")


@pytest.fixture(scope="module")
def npy() -> None:
    mpamp.get_backend("npy")
    torch.manual_seed(0)


def test_torch_calls_the_device_by_its_name() -> None:
    assert torch.npy.is_available()  # type: ignore[attr-defined]
    assert torch.device("npy").type == device.NAME


@pytest.mark.parametrize(("dtype", "expected"), [(None, BRAIN), (BRAIN, BRAIN), (HALF, HALF), (FULL, FULL)])
def test_dtypes_in_a_region(dtype: Any, expected: torch.dtype) -> None:
    x = torch.rand(4, 4).to("npy")
    with mpamp.autocast("npy", dtype=dtype):
        y = x @ x
        assert [t.dtype for t in (y, y.softmax(0), y.exp(), y + x, torch.cat([y, x]))] == [expected, *[FULL] * 4]
        with mpamp.autocast("npy", enabled=False):
            assert (x @ x).dtype is FULL
    assert (x @ x).dtype is FULL


def test_torchs_own_autocast_works_there_too_once_a_region_was_open() -> None:
    x = torch.rand(4, 4).to("npy")
    with mpamp.autocast("npy"):
        x @ x
    with torch.autocast("npy", dtype=BRAIN):
        assert (x @ x).dtype is FULL  # no table of torch's own: nothing is cast


def test_other_devices_are_left_alone() -> None:
    x = torch.rand(4, 4)
    with mpamp.autocast("npy"):
        assert (x @ x).dtype is FULL


class Net(nn.Sequential):
    """A small convolutional network."""

    def __init__(self) -> None:
        layers = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        super().__init__(*layers, nn.Linear(64, 2))


class Block(nn.Module):
    """A transformer block with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x.flatten(1).unflatten(1, (8, 8))).mean(1))


@pytest.mark.parametrize("dtype", [BRAIN, HALF])
@pytest.mark.parametrize("make", [Net, Block])
def test_training(make: type[nn.Module], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = make().to("npy")
    optimizer, scaler = torch.optim.Adam(model.parameters(), lr=5e-3), mpamp.GradScaler("npy")
    x = torch.randn(16, 1, 8, 8)
    labels = (x.mean((1, 2, 3)) > 0).long().to("npy")
    x = x.to("npy")
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        with mpamp.autocast("npy", dtype=dtype):
            out = model(x)
            loss = F.cross_entropy(out, labels)
        assert (out.dtype, loss.dtype) == (dtype, FULL)
        scaler.scale(loss).backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {FULL}
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 3


def test_scaler_skips_and_grows() -> None:
    weight = nn.Parameter(torch.ones(3, device="npy"))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.5), mpamp.GradScaler("npy", init_scale=64.0, growth_interval=2)
    found = []
    for factor in (1.0, math.inf, 1.0, 1.0, math.nan):
        optimizer.zero_grad()
        scaler.scale(weight.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append((scaler.last_step_skipped(optimizer), scaler.get_scale(), weight[0].item()))
    assert found == [(False, 64.0, 0.5), (True, 32.0, 0.5), (False, 32.0, 0.0), (False, 64.0, -0.5), (True, 32.0, -0.5)]
    other = mpamp.GradScaler("npy")
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("dtype", [BRAIN, HALF])
def test_checkpointing(dtype: torch.dtype, use_reentrant: bool) -> None:
    layer, x = nn.Linear(4, 4).to("npy"), torch.rand(2, 4).to("npy").requires_grad_()
    seen: list[tuple[torch.dtype, torch.dtype]] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        z = y.softmax(-1)
        seen.append((y.dtype, z.dtype))
        return z

    grads = []
    for checkpointed in (False, True):
        layer.zero_grad()
        with mpamp.autocast("npy", dtype=dtype), set_checkpoint_early_stop(False):
            y = checkpoint(run, x, use_reentrant=use_reentrant) if checkpointed else run(x)
        y.square().sum().backward()
        assert layer.weight.grad is not None
        grads.append(layer.weight.grad.cpu())
    assert seen == [(dtype, FULL)] * 3
    assert torch.equal(*grads)


def test_custom_functions() -> None:
    seen: list[torch.dtype] = []
    threads: list[int] = []

    class Square(torch.autograd.Function):
        @staticmethod
        @mpamp.custom_fwd(cast_inputs=FULL)
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            seen.extend([x.dtype, (x @ x).dtype])
            return x @ x

        @staticmethod
        @mpamp.custom_bwd
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            threads.append(threading.get_ident())
            seen.append((x @ x).dtype)
            return grad @ x.t() + x.t() @ grad

    x = torch.rand(4, 4, dtype=BRAIN).to("npy").requires_grad_()
    with mpamp.autocast("npy"):
        y = Square.apply(x)
    with mpamp.autocast("npy", dtype=HALF):
        y.sum().backward()
    assert seen == [FULL] * 3
    assert threads != [threading.get_ident()]  # autograd has a thread of its own for such devices
    assert x.grad is not None
    assert x.grad.dtype is BRAIN


def test_weights_are_cast_once() -> None:
    layer, x = nn.Linear(4, 4).to("npy"), torch.rand(2, 4).to("npy")
    before = mpamp.cache_info().casts
    with mpamp.autocast("npy"):
        layer(layer(x))
    assert mpamp.cache_info().casts - before == 2  # weight and bias


def test_the_conformance_kit_is_content() -> None:
    from mpamp.testing import check_backend

    report = check_backend("npy")
    assert not report.failures, str(report)
    assert len(report.passed) > 200


def test_the_backend_is_short() -> None:
    import mpamp_npy

    assert mpamp_npy.__file__ is not None
    with open(mpamp_npy.__file__, encoding="utf-8") as file:
        assert len(file.readlines()) < 60
