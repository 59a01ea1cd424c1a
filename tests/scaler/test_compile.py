"""The scaler beside ``torch.compile``: compiled code leaves it to Python, and trains as eager code does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mpamp
from mpamp.scaler import GradScaler

# Dynamo looks at what scale() returned.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


FACTORS = [1.0, math.inf, 1.0, 1.0, math.nan, 1.0]


def train(how: str, backend: str, *, late: bool = False, **options: Any) -> list[Any]:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    scaler = GradScaler("cpu", init_scale=64.0, growth_interval=2)

    def step(factor: Any) -> Any:
        with mpamp.autocast("cpu"):
            loss = model(x).float().square().mean() * factor
        scaler.scale(loss).backward()
        if late:
            scaler.unscale_(optimizer)
            scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        optimizer.zero_grad()
        scaler.update()
        return loss

    if how == "all":
        step = torch.compile(step, backend=backend)
    elif how == "optimizer":
        optimizer.step = torch.compile(optimizer.step, backend=backend)  # type: ignore[method-assign]
    for factor in FACTORS:
        step(torch.tensor(factor))
    skips = [record.skipped for record in scaler.history]
    return [skips, scaler.get_scale(), scaler.last_step_skipped(optimizer), *(p.tolist() for p in model.parameters())]


@pytest.mark.parametrize("how", ["all", "optimizer"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_compiled_training_is_eager_training(how: str, late: bool, options: dict[str, bool]) -> None:
    eager = train("none", "eager", late=late, **options)
    assert eager[0] == [not math.isfinite(factor) for factor in FACTORS]
    compiled = train(how, "eager", late=late, **options)
    assert compiled[:3] == eager[:3]
    if _steps("eager", **options) == _steps("", **options):
        assert compiled[3:] == eager[3:]
    else:  # so in torch 2.8: the learning rate is a tensor of float32 in what Dynamo makes of a step
        for found, wanted in zip(compiled[3:], eager[3:], strict=True):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=0, atol=1e-6)


def _steps(backend: str, **options: Any) -> list[float]:
    """Return what steps make of a weight without a scaler and mpamp, compiled if a backend is given."""
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 64))
    optimizer = torch.optim.SGD([weight], lr=0.1, **options)
    step: Any = torch.compile(optimizer.step, backend=backend) if backend else optimizer.step
    for _ in FACTORS:
        weight.grad = weight.detach().sin()
        step()
    return weight.tolist()  # type: ignore[no-any-return]


@pytest.mark.slow
def test_compiled_training_by_aot() -> None:
    eager, compiled = train("none", "eager"), train("all", "aot_eager")
    assert compiled[:3] == eager[:3]
    assert torch.allclose(torch.tensor(compiled[3]), torch.tensor(eager[3]), atol=1e-3)


def test_compiled_with_a_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpamp.plugins.hookspecs import hookimpl
    from mpamp.plugins.manager import manager

    class Plugin:
        skipped: list[bool] = []  # noqa: RUF012

        @hookimpl
        def mpamp_scale_event(self, event: Any) -> None:
            self.skipped.append(event.skipped)

    plugin = Plugin()
    manager()._pm.register(plugin)
    try:
        train("all", "eager")
    finally:
        manager()._pm.unregister(plugin)
    assert plugin.skipped == [not math.isfinite(factor) for factor in FACTORS]


def test_compiled_autograd() -> None:
    from torch._dynamo import compiled_autograd

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.5), GradScaler("cpu")
    for _ in range(2):
        optimizer.zero_grad()
        with compiled_autograd._enable(torch.compile(backend="eager")):
            scaler.scale((weight * 2.0).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert weight.tolist() == [-1.0, -1.0]
