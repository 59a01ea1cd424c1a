"""O1 is process-wide: threads, backward passes, steps; and all of it can be counted and taken back."""

from __future__ import annotations

import concurrent.futures
import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpamp
from mpamp.apex import ambient, amp
from mpamp.devices.registry import device_state
from mpamp.testing import KernelCounter
from tests.apex.training import data, net, start, step

HALF, FP32 = torch.float16, torch.float32
A = torch.ones(2, 2)


def dtype():
    return (A @ A).dtype


def run(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def in_place():
    """What is installed but for the regions, which are as many as there are kinds of devices here."""
    return [what for what in ambient.installed() if not what.startswith("<")]


EXPECTED = [
    "Thread.start",
    "torch.autograd._engine_run_backward",
    "BackwardCFunction.apply",
    "Tensor.cpu",
    "torch.nn.functional.interpolate",
    "torch.nn.functional.local_response_norm",
    "torch.nn.functional.multilabel_soft_margin_loss",
    "module forward pre-hook",
]


def attributes():
    return {
        "start": threading.Thread.start,
        "engine": torch.autograd._engine_run_backward,
        "apply": torch.autograd.function.BackwardCFunction.apply,
        "cpu": vars(torch.Tensor).get("cpu"),
        "interpolate": F.interpolate,
        "hooks": len(torch.nn.modules.module._global_forward_pre_hooks),
        "autocast": torch.is_autocast_enabled("cpu"),
    }


def test_what_is_installed_and_that_all_of_it_goes():
    before = attributes()
    start("O1")
    assert in_place() == EXPECTED
    assert all(attributes()[name] != before[name] for name in before)
    kernels, regions = mpamp.engine.python.kernels.installed("cpu"), len(mpamp.engine.scope.THREAD.state.entries)
    for _ in range(3):
        start("O1")
        assert in_place() == EXPECTED
        assert mpamp.engine.python.kernels.installed("cpu") == kernels
        assert len(mpamp.engine.scope.THREAD.state.entries) == regions
    amp.shutdown()
    assert attributes() == before
    assert ambient.installed() == []
    assert mpamp.engine.scope.THREAD.state.entries == []
    assert dtype() is FP32


def test_it_reaches_models_that_were_never_passed():
    start("O1")
    assert nn.Linear(2, 2)(A).dtype is HALF


def test_without_patching_it_only_scales():
    model, optimizer = start("O1", patch_torch_functions=False)
    assert ambient.installed() == []
    assert model(data()).dtype is FP32
    step(model, optimizer, data())


# -- Threads -----------------------------------------------------------------------------------------


def test_threads_that_start_later():
    start("O1")
    assert run(dtype) is HALF
    assert run(lambda: run(dtype)) is HALF
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(dtype).result() is HALF

    class Own(threading.Thread):
        def run(self):
            self.found = dtype()

    thread = Own()
    thread.start()
    thread.join()
    assert thread.found is HALF


def test_threads_that_run_already_join_and_leave_with_a_module():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:

        def there(function):
            return pool.submit(function).result()

        linear = nn.Linear(2, 2)
        assert there(dtype) is FP32
        start("O1")
        assert there(lambda: linear(A).dtype) is HALF
        assert there(dtype) is HALF
        amp.shutdown()
        assert ambient.installed() == ["module forward pre-hook"]
        assert there(lambda: linear(A).dtype) is FP32
        assert there(dtype) is FP32
        assert ambient.installed() == []


def test_a_thread_of_an_earlier_initialize_moves_to_the_new_dtype():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        linear = nn.Linear(2, 2)
        start("O1")
        assert pool.submit(lambda: linear(A).dtype).result() is HALF
        start("O4")
        assert pool.submit(lambda: linear(A).dtype).result() is torch.bfloat16


def test_a_thread_that_ends_after_shutdown():
    start("O1")
    go, done = threading.Event(), []
    thread = threading.Thread(target=lambda: (go.wait(), done.append(mpamp.engine.scope.THREAD.state)))
    thread.start()
    amp.shutdown()
    go.set()
    thread.join()
    assert done[0].entries == []
    assert ambient.installed() == []


def test_threads_inside_disable_casts():
    start("O1")
    with amp.disable_casts():
        assert run(dtype) is FP32
    assert run(dtype) is HALF


def test_data_parallel_threads():
    start("O1")
    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
    found = []

    def work(module):
        with torch.amp.autocast("cpu", enabled=torch.is_autocast_enabled("cpu")):
            found.append(module(A).dtype)

    for module in modules:
        thread = threading.Thread(target=work, args=(module,))
        thread.start()
        thread.join()
    assert found == [HALF, HALF]


# -- Casts off ---------------------------------------------------------------------------------------


def test_disable_casts_nests_and_survives_exceptions():
    start("O1")
    with amp.disable_casts():
        with amp.disable_casts():
            assert dtype() is FP32
        assert dtype() is FP32
    assert dtype() is HALF
    with pytest.raises(KeyError), amp.disable_casts():
        raise KeyError
    assert dtype() is HALF
    assert amp.disable_casts()(dtype)() is FP32


@pytest.mark.parametrize("level", ["O0", "O2", "O3", None])
def test_disable_casts_does_nothing_without_casts(level):
    if level is not None:
        start(level)
    with amp.disable_casts():
        assert dtype() is FP32


def test_no_shutdown_inside_disable_casts():
    model, optimizer = start("O1")
    with amp.disable_casts():
        with pytest.raises(RuntimeError, match="inside disable_casts"):
            amp.shutdown()
        with pytest.raises(RuntimeError, match="inside disable_casts"):
            start("O2")
    step(model, optimizer, data())


def test_no_initialize_inside_an_open_region():
    start("O1")
    with mpamp.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="open region"):
        amp.shutdown()
    assert dtype() is HALF


class Watching(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            closure()
        self.seen = dtype()


def test_steps_run_without_casts_and_closures_with():
    _, optimizer = start("O1", make=lambda m: Watching(m.parameters(), lr=1.0))
    optimizer.step()
    assert optimizer.seen is FP32
    seen = []
    optimizer.step(lambda: seen.append(dtype()))
    assert (seen, optimizer.seen, dtype()) == ([HALF], FP32, HALF)


def test_casts_return_after_a_step_that_raised():
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise KeyError

    model, optimizer = start("O1", make=lambda m: Failing(m.parameters(), lr=1.0))
    for _ in range(2):
        with pytest.raises(KeyError):
            optimizer.step()
        assert model(data()).dtype is HALF
        assert dtype() is HALF


# -- Backward ----------------------------------------------------------------------------------------


def test_backward_formulas_are_not_cast():
    start("O1")
    with amp.disable_casts():
        a = torch.full((2, 2), 1 + 2.0**-20, requires_grad=True)
        loss = (a @ a.detach()).sum()
    with KernelCounter() as kernels:
        loss.backward()
    assert kernels.counts["aten::_to_copy"] == 0
    assert a.grad[0, 0].item() == 2 * (1 + 2.0**-20)
    assert dtype() is HALF


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        Product.seen = torch.mm(grad, weight.t()).dtype
        return torch.mm(grad, weight.t()).to(x.dtype), torch.mm(x.t(), grad).to(weight.dtype)


def test_functions_in_python_are_cast_in_backward_too():
    start("O1")
    x, weight = A.clone().requires_grad_(), A.clone().requires_grad_()
    out = Product.apply(x, weight)
    assert out.dtype is HALF
    out.float().sum().backward()
    assert Product.seen is HALF
    assert (x.grad.dtype, weight.grad.dtype, dtype()) == (FP32, FP32, HALF)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recompute_has_the_dtypes_of_forward(use_reentrant):
    start("O1")
    seen = []

    def block(x):
        y = x @ x
        seen.append((y.dtype, y.softmax(0).dtype, y.exp().dtype, (y * torch.ones(2, 2)).dtype))
        return y.exp()

    for _ in range(1100):  # more regions than torch's state is remembered for
        with mpamp.autocast("cpu", torch.bfloat16, ops={"mm": "fallthrough"}):
            pass
    checkpoint(block, A.clone().requires_grad_(), use_reentrant=use_reentrant).float().sum().backward()
    assert seen == [(HALF, FP32, FP32, FP32)] * 2


def test_double_backward():
    start("O1")
    x = A.clone().requires_grad_()
    (grad,) = torch.autograd.grad((x @ x).float().pow(2).sum(), [x], create_graph=True)
    grad.pow(2).sum().backward()
    assert x.grad.dtype is FP32
    assert torch.isfinite(x.grad).all()


# -- Others' regions ---------------------------------------------------------------------------------


def test_regions_of_others_nest():
    start("O1")
    with torch.autocast("cpu", enabled=False):
        assert dtype() is FP32
    with mpamp.autocast("cpu", torch.bfloat16):
        assert dtype() is torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert dtype() is torch.bfloat16
    assert dtype() is HALF


def test_a_dtype_that_the_device_lacks_changes_nothing(monkeypatch):
    backend = mpamp.get_backend("cpu")
    model = net()
    before = copy.deepcopy(model.state_dict())
    monkeypatch.setattr(type(backend), "lower_precision_dtypes", (torch.bfloat16,))
    device_state("cpu").invalidate()
    table = mpamp.OpTable.named("apex", "cpu").override({"gelu": "fallthrough"}, name="apex")
    monkeypatch.setattr("mpamp.apex.lists.OpTable.named", lambda name, device: table)
    with pytest.raises(mpamp.UnsupportedDtypeError):
        amp.initialize(model, opt_level="O1", verbosity=0)
    assert ambient.installed() == []
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not hasattr(amp._amp_state, "opt_properties")


@pytest.mark.parametrize("when", ["during", "after"])
@pytest.mark.parametrize("region", [torch.autocast, mpamp.autocast])
def test_arithmetic_with_numbers_in_regions_of_others(region, when):
    start("O1")
    if when == "after":
        amp.shutdown()
    x, point = A.bfloat16(), torch.tensor(1.0).bfloat16()
    with region("cpu", dtype=torch.bfloat16):
        for found in (x / 4, 2.0 * x, x + 1, 1 - x, point * 2.5, torch.add(x, 1, alpha=2), x.clone().div_(4)):
            assert found.dtype is torch.bfloat16
        assert F.mse_loss(x, x).dtype is FP32
