"""mpamp.backends.<device>.amp: what torch.<device>.amp has, so that a script changes only its import."""

from __future__ import annotations

import importlib
import inspect
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.cpu.amp
import torch.cuda.amp
from torch._subclasses.fake_tensor import FakeTensorMode

import mpamp
from mpamp.backends.cpu import amp as cpu_amp
from mpamp.backends.cuda import amp as cuda_amp
from mpamp.backends.xpu import amp as xpu_amp
from tests import processes

ROOT = Path(__file__).parents[2]
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
NAMESPACES = {"cpu": cpu_amp, "cuda": cuda_amp, "xpu": xpu_amp}
DEFAULTS = {"cpu": BRAIN, "cuda": HALF, "xpu": BRAIN}
EACH = pytest.mark.parametrize("device", NAMESPACES)


def arguments(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", ["autocast", "GradScaler", "custom_fwd", "custom_bwd"])
def test_signatures_are_torchs(name: str) -> None:
    assert arguments(getattr(cuda_amp, name)) == arguments(getattr(torch.cuda.amp, name))
    if hasattr(torch.cpu.amp, name):
        assert arguments(getattr(cpu_amp, name)) == arguments(getattr(torch.cpu.amp, name))
    given, wanted = arguments(getattr(xpu_amp, name)), arguments(getattr(torch.cuda.amp, name))
    assert given == [(n, k, BRAIN if n == "dtype" else d) for n, k, d in wanted]  # Intel's differs in that alone


def test_every_name_is_there() -> None:
    assert set(cuda_amp.__all__) >= set(torch.cuda.amp.__all__)
    for module in NAMESPACES.values():
        found: dict[str, Any] = {}
        exec(f"from {module.__name__} import *", found)
        assert set(module.__all__) <= set(found)
    with pytest.raises(AttributeError, match=r"mpamp\.backends\.cpu\.amp.*GradScalar"):
        _ = cpu_amp.GradScalar


@EACH
def test_autocast(device: str) -> None:
    amp = NAMESPACES[device]
    region = amp.autocast()
    assert (region.device_type, region.dtype, region.enabled) == (device, DEFAULTS[device], True)
    assert amp.autocast(dtype=None).dtype is DEFAULTS[device]
    assert amp.autocast(True, HALF, False).__reduce__() == mpamp.autocast(device, HALF, True, False).__reduce__()
    assert not amp.autocast(False).enabled
    with FakeTensorMode(), amp.autocast(dtype=BRAIN):
        x = torch.ones(2, 2, device=device)
        assert x.mm(x).dtype is BRAIN

    @amp.autocast(dtype=HALF)
    def decorated(x: torch.Tensor) -> torch.dtype:
        return x.mm(x).dtype

    with FakeTensorMode():
        assert decorated(torch.ones(2, 2, device=device)) is HALF


def test_cache_enabled_is_passed_on() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    from mpamp.testing import WeightCastCounter

    for enabled, count in ((True, 1), (False, 2)):
        with WeightCastCounter([weight]) as casts, cpu_amp.autocast(True, BRAIN, enabled):
            torch.mm(weight, torch.mm(weight, torch.ones(2, 2)))
        assert casts.count == count


def test_in_a_compiled_function() -> None:
    torch._dynamo.reset()

    def function(x: torch.Tensor) -> torch.Tensor:
        with cpu_amp.autocast(dtype=HALF):
            return x.mm(x)

    assert torch.compile(function, fullgraph=True, backend="eager")(torch.ones(2, 2)).dtype is HALF


@EACH
def test_grad_scaler(device: str) -> None:
    amp = NAMESPACES[device]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the device isn't on this machine
        scaler = amp.GradScaler(8.0, 3.0, 0.25, 5)
        assert isinstance(scaler, amp.GradScaler)
        assert isinstance(scaler, mpamp.scaler.GradScaler)
        assert isinstance(scaler, torch.amp.GradScaler)
        assert scaler._device == device
        assert not amp.GradScaler(enabled=False).is_enabled()
    if scaler.is_enabled():
        assert [scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor()] == [8.0, 3.0, 0.25]
        assert scaler.get_growth_interval() == 5
        assert set(scaler.state_dict()) == set(torch.amp.GradScaler(device).state_dict())


def test_grad_scaler_can_be_pickled_subclassed_and_named() -> None:
    scaler = pickle.loads(pickle.dumps(cpu_amp.GradScaler(init_scale=4.0)))
    assert type(scaler) is cpu_amp.GradScaler
    assert scaler.get_scale() == 4.0
    assert (cpu_amp.GradScaler.__module__, cpu_amp.GradScaler.__name__) == ("mpamp.backends.cpu.amp", "GradScaler")

    class Mine(cpu_amp.GradScaler):  # type: ignore[misc]
        pass

    assert Mine(2.0).get_scale() == 2.0


@EACH
@pytest.mark.parametrize("with_parentheses", [True, False])
def test_custom_functions(device: str, with_parentheses: bool) -> None:
    amp = NAMESPACES[device]
    seen: list[torch.dtype] = []

    class F(torch.autograd.Function):
        @staticmethod
        @(amp.custom_fwd(cast_inputs=HALF) if with_parentheses else amp.custom_fwd)
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            seen.append(x.mm(x).dtype)
            return x.clone()

        @staticmethod
        @amp.custom_bwd
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            seen.append(x.mm(x).dtype)
            return grad

    x = torch.ones(2, 2, requires_grad=True)
    if device != "cpu":
        F.apply(x).sum().backward()  # another device's region: none
        assert seen == [FULL, FULL]
    with cpu_amp.autocast():
        F.apply(x).sum().backward()
    wanted = (HALF if with_parentheses else BRAIN) if device == "cpu" else BRAIN
    assert seen[-2:] == [wanted, wanted]
    with FakeTensorMode(), amp.autocast(dtype=BRAIN):
        F.apply(torch.ones(2, 2, device=device))
    assert seen[-1] is (HALF if with_parentheses else BRAIN)


SCRIPT = """
import torch
from torch.{device}.amp import autocast, GradScaler

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to("{device}")
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = GradScaler(init_scale=2.0**10, growth_interval=2)
x, y = torch.randn(16, 8, device="{device}"), torch.randn(16, 1, device="{device}")
for step in range(5):
    optimizer.zero_grad()
    with autocast(enabled=True, dtype=torch.float16):
        out = net(x)
        loss = torch.nn.functional.mse_loss(out, y)
    scaler.scale(loss * float("inf") if step == 3 else loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
result = out.dtype, loss.dtype, scaler.state_dict(), {{k: v.cpu() for k, v in net.state_dict().items()}}
"""


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.accelerator,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_a_script_changes_only_its_import(device: str) -> None:
    torchs: dict[str, Any] = {}
    ours: dict[str, Any] = {}
    script = SCRIPT.format(device=device)
    exec(script, torchs)
    exec(script.replace("from torch.", "from mpamp.backends."), ours)
    *dtypes, scaler, weights = ours["result"]
    *torchs_dtypes, torchs_scaler, torchs_weights = torchs["result"]
    assert dtypes == torchs_dtypes
    assert scaler == torchs_scaler
    assert scaler["scale"] == 1024.0  # grown once, backed off once
    for name, weight in weights.items():
        torch.testing.assert_close(weight, torchs_weights[name], rtol=1e-3, atol=1e-4)


def test_a_backend_doesnt_load_its_namespace() -> None:
    code = (
        "import sys, mpamp.backends.cpu, mpamp.backends.cuda, mpamp.backends.xpu\n"
        "print([m for m in sys.modules if m.startswith('mpamp.backends.') and m.endswith('.amp')])\n"
        "from mpamp.backends.cuda import amp\n"
        "import torch\n"
        "print(torch.cuda.is_initialized())\n"
    )
    done = processes.python("-c", code, cwd=ROOT)
    assert done.stdout.split() == ["[]", "False"], done.stderr


def test_each_is_a_module_of_its_own() -> None:
    for device, module in NAMESPACES.items():
        assert importlib.import_module(f"mpamp.backends.{device}.amp") is module
