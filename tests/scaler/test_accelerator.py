"""On a real accelerator: no waits beyond torch's, graphs, the kinds of gradients, and training in float16."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import mpamp
from mpamp.errors import MpampWarning
from mpamp.scaler import GradScaler, ScaleRecord

ACCELERATOR = torch.accelerator.current_accelerator(check_available=True)
DEVICE = torch.device("cpu") if ACCELERATOR is None else torch.device(ACCELERATOR.type, 0)

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(ACCELERATOR is None, reason="needs an accelerator"),
]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="counts waits, or records graphs, by torch.cuda")

ADAMS: dict[str, dict[str, bool]] = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@pytest.fixture
def weights() -> list[torch.nn.Parameter]:
    """Return parameters on the accelerator."""
    return [torch.nn.Parameter(torch.ones(n, device=DEVICE)) for n in (3, 5)]


@pytest.fixture
def waits() -> Iterator[Callable[[], int]]:
    """Return what tells how often the host has waited for the device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lambda: sum("synchroniz" in str(w.message) for w in caught)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def iteration(scaler: Any, optimizer: Any, factor: float = 1.0, *, clips: bool = False) -> None:
    weights = optimizer.param_groups[0]["params"]
    optimizer.zero_grad()
    scaler.scale(sum(w.sum() for w in weights) * factor).backward()
    if clips:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
    scaler.step(optimizer)
    scaler.update()


@needs_cuda
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize(("name", "per_step"), [("plain", 1), ("foreach", 1), ("fused", 0)])
def test_accelerator_waits(weights: Any, waits: Any, name: str, per_step: int, clips: bool) -> None:
    optimizer, scaler = torch.optim.Adam(weights, **ADAMS[name]), GradScaler(DEVICE.type, max_consecutive_skips=3)
    iteration(scaler, optimizer)
    torch.accelerator.synchronize()
    before = waits()
    for _ in range(5):
        iteration(scaler, optimizer, clips=clips)
    assert waits() - before == 5 * per_step


@pytest.mark.parametrize("name", ADAMS)
def test_accelerator_training_is_torchs(name: str) -> None:
    found = []
    for make in (torch.amp.GradScaler, GradScaler):
        weights = [torch.nn.Parameter(torch.ones(n, device=DEVICE)) for n in (3, 5)]
        optimizer = torch.optim.Adam(weights, lr=0.1, **ADAMS[name])
        scaler = make(DEVICE.type, init_scale=64.0, growth_interval=2)
        scales = []
        for number, factor in enumerate((1.0, math.inf, 1.0, math.nan, 1.0, 1.0, 1.0)):
            iteration(scaler, optimizer, factor, clips=number % 2 == 0)
            scales.append(scaler.get_scale())
        found.append((scales, [w.tolist() for w in weights]))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ADAMS)
def test_accelerator_skips_and_history(name: str, weights: Any) -> None:
    optimizer, scaler = torch.optim.Adam(weights, **ADAMS[name]), GradScaler(DEVICE.type, init_scale=64.0)
    for factor in (1.0, math.inf):
        iteration(scaler, optimizer, factor)
    assert scaler.last_step_skipped(optimizer)
    assert scaler.history == [ScaleRecord(1, 64.0, False), ScaleRecord(2, 64.0, True)]


def test_accelerator_fused_skips_are_reported(weights: Any) -> None:
    optimizer, scaler = torch.optim.Adam(weights, fused=True), GradScaler(DEVICE.type, max_consecutive_skips=5)

    def skip_often() -> None:
        for _ in range(20):
            iteration(scaler, optimizer, math.inf)
            torch.accelerator.synchronize()

    with pytest.warns(MpampWarning, match="parameter 0 of group 0"):
        skip_often()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("has_kernels", [True, False])
def test_accelerator_gradients(dtype: torch.dtype, has_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_kernels:
        monkeypatch.setattr("mpamp.scaler.kernels.has_kernel", lambda device_type, op: False)
    good, bad = (torch.nn.Parameter(torch.zeros(4, dtype=dtype, device=DEVICE)) for _ in range(2))
    good.grad, bad.grad = torch.full_like(good, 48.0), torch.full_like(bad, math.inf)
    scaler = GradScaler(DEVICE.type, init_scale=16.0, allow_fp16_grads=True)
    scaler.scale(torch.ones((), device=DEVICE))
    for param, is_bad in ((good, False), (bad, True)):
        optimizer = torch.optim.SGD([param], lr=1.0)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert scaler.last_step_skipped(optimizer) is is_bad
    assert torch.equal(good, torch.full_like(good, -3.0))
    assert torch.equal(bad, torch.zeros_like(bad))


def test_accelerator_and_processor_in_one_optimizer() -> None:
    weights = [torch.nn.Parameter(torch.ones(3, device=d)) for d in (DEVICE, "cpu")]
    optimizer, scaler = torch.optim.SGD(weights, lr=0.5), GradScaler(DEVICE.type)
    for factor, expected in ((1.0, 0.5), (math.inf, 0.5)):
        optimizer.zero_grad()
        first, second = scaler.scale([w.sum() for w in weights])
        first.backward()
        (second * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(w.cpu(), torch.full((3,), expected)) for w in weights)
    assert scaler.get_scale() == 2.0**15


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_accelerator_sparse_float16(weights: Any) -> None:
    rows = torch.full((2, 1), 40000.0, dtype=torch.float16, device=DEVICE)
    param = torch.nn.Parameter(torch.zeros(2, 1, dtype=torch.float16, device=DEVICE))
    param.grad = torch.sparse_coo_tensor([[1, 1]], rows, (2, 1), check_invariants=True)
    scaler, optimizer = GradScaler(DEVICE.type, allow_fp16_grads=True), torch.optim.SGD([param], lr=1.0)
    scaler.scale(torch.ones((), device=DEVICE))
    scaler.step(optimizer)
    assert scaler.last_step_skipped(optimizer)


@needs_cuda
def test_accelerator_graph_of_a_whole_iteration() -> None:
    weight, factor = torch.nn.Parameter(torch.ones(3, device=DEVICE)), torch.ones((), device=DEVICE)
    optimizer = torch.optim.Adam([weight], lr=torch.tensor(0.1, device=DEVICE), fused=True, capturable=True)
    scaler = GradScaler(DEVICE.type, init_scale=64.0)

    def step() -> None:
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            optimizer.zero_grad()
            step()
    torch.cuda.current_stream().wait_stream(stream)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    before = len(scaler.history)
    skips, scales = [], []
    for value in (1.0, math.inf, 1.0):
        was = weight.detach().clone()
        factor.fill_(value)
        graph.replay()
        skips.append(torch.equal(was, weight))
        scales.append(scaler.get_scale())
    assert skips == [False, True, False]
    assert scales == [64.0, 32.0, 32.0]
    assert [r.skipped for r in scaler.history[before:]] == [False, True, False]


def test_accelerator_trains_in_float16(weights: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 16, device=DEVICE)
    y = x @ torch.randn(16, 1, device=DEVICE)
    losses = []
    for dtype in (torch.float32, torch.float16):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)).to(DEVICE)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
        scaler = GradScaler(DEVICE.type, enabled=dtype is torch.float16)
        for _ in range(200):
            optimizer.zero_grad()
            with mpamp.autocast(DEVICE.type, dtype=dtype):
                loss = torch.nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
    assert losses[1] < max(2 * losses[0], 0.05)
