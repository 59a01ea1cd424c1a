"""torch's process-wide defaults don't reach into the scaler."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mpamp.scaler import GradScaler, kernels

FACTORS = [2.0, math.inf, 2.0, 2.0, 2.0]


@pytest.fixture(params=[torch.float64, torch.bfloat16, torch.float16], ids=str)
def _default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    for cached in (kernels._takes, kernels._has_float64):
        cached.cache_clear()  # what they try depends on nothing but the device
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def _default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def train(options: Any, dtype: torch.dtype) -> list[Any]:
    weights = [torch.nn.Parameter(torch.ones(2, dtype=dtype, device="cpu")) for _ in range(2)]
    optimizers = [torch.optim.SGD(weights, lr=0.25, **options), torch.optim.SGD(weights[1:], lr=0.25)]
    scaler = GradScaler("cpu", init_scale=64.0, growth_interval=2, allow_fp16_grads=True)
    for factor in FACTORS:
        weights[0].grad = weights[1].grad = None
        scaler.scale(sum(w.real.sum() for w in weights) * factor).backward()
        scaler.unscale_(optimizers[0])
        scaler.scale(weights[0].real.sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    dtypes = {scaler._scale.dtype, scaler._growth_tracker.dtype}  # type: ignore[union-attr]
    return [[w.tolist() for w in weights], scaler.state_dict(), scaler.history, dtypes]


EXPECTED = [[1 - 0.25 * 3 * 4] * 2, [1 - 0.25 * 2 * 2 * 4] * 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.usefixtures("_default_dtype")
def test_default_dtype(dtype: torch.dtype, options: Any, has_kernels: bool, request: pytest.FixtureRequest) -> None:
    if dtype.is_complex and "fused" in options:
        pytest.skip("torch has no such kernel")
    if not has_kernels:
        request.getfixturevalue("without_kernels")
    weights, state, history, dtypes = train(options, dtype)
    assert weights == EXPECTED
    assert (state["scale"], state["_growth_tracker"]) == (64.0, 1)
    assert [record.skipped for record in history] == [not math.isfinite(factor) for factor in FACTORS]
    assert dtypes == {torch.float32, torch.int32}


@pytest.mark.usefixtures("_default_device")
def test_default_device() -> None:
    assert train({"foreach": True}, torch.float32)[0] == EXPECTED


@pytest.mark.parametrize("method", ["unscale_", "step", "update"])
def test_inference_mode(method: str, scaler: GradScaler, weights: Any, run_backward: Any) -> None:
    optimizer = torch.optim.SGD(weights, lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        run_backward(scaler, weights)
        for name, arguments in (("unscale_", [optimizer]), ("step", [optimizer]), ("update", [])):
            with torch.inference_mode(name == method):
                getattr(scaler, name)(*arguments)
    assert weights[0].tolist() == [0.0] * 3
    assert scaler.history[1].scale == 1024.0


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_scale_under_functorch(transform: str, scaler: GradScaler) -> None:
    def loss(x: Any) -> Any:
        return scaler.scale((x * x).sum())

    x = torch.ones(3, 2)
    if transform == "grad":
        result = torch.func.grad(loss)(x)
    elif transform == "vmap":
        result = torch.func.vmap(torch.func.grad(loss))(x)
    else:
        result = torch.func.jvp(loss, (x,), (x,))[1] / 6
    assert torch.equal(result, torch.full_like(result, 2048.0))
