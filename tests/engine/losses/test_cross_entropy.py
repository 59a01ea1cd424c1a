"""The cross entropy of class indices: which calls go by the kernels, and that all give what float32 gives.

The kernels are torch's ops here; ``test_kernels`` has Triton's.
"""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import mpamp
from mpamp.backends.cpu import CpuBackend
from mpamp.backends.cuda import CudaBackend
from mpamp.backends.xpu import XpuBackend
from mpamp.devices import registry
from mpamp.devices.registry import device_state
from mpamp.engine import losses, withdraw
from mpamp.engine.losses import cross_entropy as fused
from mpamp.engine.python import kernels as engine
from mpamp.engine.python.codegen import kernel_source
from mpamp.errors import MpampWarning
from mpamp.rules.eligibility import find_overload
from tests.torches import needs_transforms

WORKS = fused._works
OP = "aten::cross_entropy_loss"
BF16, HALF, FP32 = torch.bfloat16, torch.float16, torch.float32


class Kernels:
    """Stands for the Triton kernels: the same functions by torch's ops, with counts."""

    def __init__(self):
        self.forwards = self.backwards = 0

    def forward(self, rows, targets, weights, ignore_index, smoothing):
        assert rows.dtype in (BF16, HALF)
        assert rows.stride(1) == 1
        self.forwards += 1
        x = rows.float()
        tops = x.amax(1)
        log_sums = (x - tops[:, None]).exp().sum(1).log()
        options = {"ignore_index": ignore_index, "label_smoothing": smoothing}
        loss = torch.ops.aten.cross_entropy_loss(x, targets, weights, 0, *options.values())
        w = torch.ones(rows.shape[1]) if weights is None else weights
        is_used = targets != ignore_index
        return loss, torch.where(is_used, w[targets.where(is_used, 0)], 0.0), tops, log_sums

    def backward(self, rows, targets, weights, upstream, tops, log_sums, ignore_index, smoothing):
        self.backwards += 1
        torch.testing.assert_close((rows.float() - tops[:, None]).exp().sum(1).log(), log_sums)
        assert upstream.dtype is FP32
        with torch.enable_grad():
            x = rows.float().requires_grad_()
            loss = torch.ops.aten.cross_entropy_loss(x, targets, weights, 0, ignore_index, smoothing)
        (found,) = torch.autograd.grad(loss, x, upstream.expand(targets.shape))
        return found.to(rows.dtype)

    @property
    def counts(self):
        return self.forwards, self.backwards


@pytest.fixture
def kernels(monkeypatch):
    """Have the processor's regions take kernels for logits of any size, as if torch had no rule of its own for them."""
    cpu, found = device_state("cpu"), Kernels()
    withdraw(cpu)
    native = {op: row for op, row in engine._native_policies("cpu").items() if op != OP}
    monkeypatch.setattr(engine, "_native_policies", lambda device_type: native)
    monkeypatch.setattr(CpuBackend, "has_triton", True)
    monkeypatch.setattr(fused, "MINIMUM", 1)
    monkeypatch.setattr(fused, "_works", lambda device, dtype: True)
    monkeypatch.setattr(fused, "_kernels", lambda: found)
    yield found
    withdraw(cpu)


def arguments(*shape, dtype=BF16):
    torch.manual_seed(0)
    logits = (torch.randn(shape) * 3).to(dtype)
    target = torch.randint(shape[1], (shape[0], *shape[2:]))
    target.view(-1)[::4] = -100
    return logits, target


def run(logits, target, *, upstream=None, dtype=BF16, loss_of=cross_entropy, **settings):
    """Return the loss and the logits' gradient in a region."""
    x = logits.detach().clone().requires_grad_()
    with mpamp.autocast("cpu", dtype):
        loss = loss_of(x, target, **settings)
    loss.backward(torch.ones_like(loss) if upstream is None else upstream)
    return loss.detach(), x.grad


def expect(logits, target, *, upstream=None, **settings):
    x = logits.detach().float().requires_grad_()
    loss = cross_entropy(x, target, **settings)
    loss.backward(torch.ones_like(loss) if upstream is None else upstream)
    return loss.detach(), x.grad.to(logits.dtype)


# -- Calls that go by the kernels --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, HALF], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("has_weight", [False, True], ids=["", "weight"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
def test_values_and_gradients_are_those_of_float32(kernels, dtype, reduction, has_weight, label_smoothing):
    logits, target = arguments(12, 9, dtype=dtype)
    weight = torch.rand(9) if has_weight else None
    settings = {"weight": weight, "reduction": reduction, "label_smoothing": label_smoothing}
    upstream = torch.randn(12) if reduction == "none" else torch.tensor(512.0)
    loss, gradient = run(logits, target, dtype=dtype, upstream=upstream, **settings)
    expected, expected_gradient = expect(logits, target, upstream=upstream, **settings)
    assert loss.dtype is FP32
    assert gradient.dtype is dtype
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=torch.finfo(dtype).eps, atol=1e-7)
    assert kernels.counts == (1, 1)


def test_another_ignored_index_and_a_weight_in_16_bits(kernels):
    logits, target = arguments(12, 9)
    target[::4] = 3
    weight = torch.rand(9).to(BF16)
    found = run(logits, target, weight=weight, ignore_index=3)
    torch.testing.assert_close(found, expect(logits, target, weight=weight.float(), ignore_index=3))
    assert kernels.counts == (1, 1)


def test_a_mean_over_nothing_is_nan_and_its_gradient_zero(kernels):
    logits, target = arguments(12, 9)
    target[:] = -100
    loss, gradient = run(logits, target)
    assert loss.isnan()
    assert gradient.count_nonzero() == 0
    assert kernels.forwards == 1


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_transposed_batch_of_sequences(kernels, reduction):
    logits, target = arguments(12, 9)
    upstream = torch.randn(3, 4) if reduction == "none" else None

    def loss_of(x, y, **settings):
        return cross_entropy(x.view(3, 4, 9).transpose(1, 2), y.view(3, 4), **settings)

    loss, gradient = run(logits, target, upstream=upstream, loss_of=loss_of, reduction=reduction)
    flat = None if upstream is None else upstream.flatten()
    expected, expected_gradient = expect(logits, target, upstream=flat, reduction=reduction)
    assert loss.shape == ((3, 4) if reduction == "none" else ())
    torch.testing.assert_close((loss.flatten(), gradient), (expected.flatten(), expected_gradient))
    assert kernels.counts == (1, 1)


def test_rows_that_lie_apart_and_a_target_that_does(kernels):
    logits, target = arguments(12, 9)
    wide, pairs = torch.zeros(12, 20, dtype=BF16), torch.stack([target, target], 1)
    wide[:, 3:12] = logits
    found, gradient = run(wide, pairs, loss_of=lambda x, y: cross_entropy(x[:, 3:12], y[:, 0]))
    expected, expected_gradient = expect(logits, target)
    torch.testing.assert_close((found, gradient[:, 3:12]), (expected, expected_gradient))
    assert kernels.counts == (1, 1)


@pytest.mark.parametrize("no_gradient", [torch.no_grad, torch.inference_mode])
def test_without_a_gradient_nothing_is_kept(kernels, no_gradient):
    logits, target = arguments(12, 9)
    with mpamp.autocast("cpu", BF16):
        detached = cross_entropy(logits, target)
        with no_gradient():
            loss = cross_entropy(logits.clone().requires_grad_(), target)
    assert detached.grad_fn is None
    assert loss.grad_fn is None
    assert kernels.counts == (2, 0)


def test_the_result_may_be_written_into(kernels):
    logits, target = arguments(12, 9)
    found, gradient = run(logits, target, loss_of=lambda x, y: cross_entropy(x, y, reduction="none").mul_(2).sum())
    expected, expected_gradient = expect(logits, target, reduction="sum", upstream=torch.tensor(2.0))
    torch.testing.assert_close((found, gradient), (expected * 2, expected_gradient))


def test_the_float32_regions_own_logits_in_16_bits(kernels):
    logits, target = arguments(12, 9)
    torch.testing.assert_close(run(logits, target, dtype=FP32), expect(logits, target))
    assert kernels.counts == (1, 1)


def test_hooks_on_the_logits_run_once(kernels):
    logits, target = arguments(12, 9)
    for create_graph in (False, True):
        x, calls = logits.clone().requires_grad_(), []
        x.register_hook(calls.append)
        with mpamp.autocast("cpu", BF16):
            loss = cross_entropy(x, target)
        torch.autograd.grad(loss, x, create_graph=create_graph)
        assert len(calls) == 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints(kernels, use_reentrant):
    logits, target = arguments(12, 9)

    def loss_of(x, y):
        return checkpoint(cross_entropy, x, y, use_reentrant=use_reentrant)

    torch.testing.assert_close(run(logits, target, loss_of=loss_of), expect(logits, target))
    assert kernels.counts == (2, 1)


def test_a_scaler_finds_what_overflows(kernels):
    logits, target = arguments(12, 9, dtype=HALF)
    x = logits.float().requires_grad_()
    optimizer, scaler = torch.optim.SGD([x]), mpamp.GradScaler("cpu", init_scale=2.0**24)
    with mpamp.autocast("cpu", HALF):
        loss = cross_entropy(x.half(), target)
    scaler.scale(loss).backward()
    assert x.grad.isinf().any()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**23
    assert torch.equal(x, logits.float())
    assert kernels.counts == (1, 1)


# -- Gradients of gradients, and transforms of them --------------------------------------------------


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("has_weight", [False, True], ids=["", "weight"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_the_formula_of_the_gradient_has_gradients(reduction, has_weight, label_smoothing):
    torch.manual_seed(0)
    x, target = torch.randn(6, 5, requires_grad=True), torch.tensor([0, 4, -100, 2, 2, 1])
    weight = torch.rand(5) if has_weight else None
    loss = cross_entropy(x, target, weight, reduction=reduction, label_smoothing=label_smoothing)
    upstream = torch.randn_like(loss, requires_grad=True)
    (expected,) = torch.autograd.grad(loss, x, upstream, create_graph=True)
    used = target[target != -100]
    divisor = (len(used) if weight is None else weight[used].sum()) if reduction == "mean" else 1
    found = fused.gradient(x, target, weight, upstream / divisor, -100, label_smoothing)
    torch.testing.assert_close(found, expected)
    second = torch.autograd.grad(found.square().sum(), (x, upstream))
    torch.testing.assert_close(second, torch.autograd.grad(expected.square().sum(), (x, upstream)))


def test_double_backward_goes_by_torchs_ops(kernels):
    logits, target = arguments(12, 9)
    found = []
    for loss_of in (cross_entropy, lambda x, y: cross_entropy(x.float(), y)):
        x = logits.clone().requires_grad_()
        with mpamp.autocast("cpu", BF16):
            loss = loss_of(x, target)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        found.append((first.detach(), *torch.autograd.grad(first.float().square().sum(), x)))
    torch.testing.assert_close(found[0], found[1])
    assert kernels.counts == (1, 0)


def test_a_batch_of_gradients_goes_by_torchs_ops(kernels):
    logits, target = arguments(3, 9)
    x, upstreams = logits.clone().requires_grad_(), torch.eye(3)
    with mpamp.autocast("cpu", BF16):
        loss = cross_entropy(x, target, reduction="none")
    (found,) = torch.autograd.grad(loss, x, upstreams, is_grads_batched=True)
    expected = torch.stack([expect(logits, target, reduction="none", upstream=u)[1] for u in upstreams])
    torch.testing.assert_close(found, expected)
    assert kernels.counts == (1, 0)


def test_compiled_autograd_goes_by_torchs_ops(kernels):
    logits, target = arguments(12, 9)
    x = logits.clone().requires_grad_()
    with mpamp.autocast("cpu", BF16):
        loss = cross_entropy(x, target)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    torch.testing.assert_close((loss.detach(), x.grad), expect(logits, target))
    assert kernels.counts == (1, 0)
    torch._dynamo.reset()


def test_a_dispatch_mode_around_backward_sees_torchs_ops(kernels):
    logits, target = arguments(12, 9)
    x = logits.clone().requires_grad_()
    with mpamp.autocast("cpu", BF16):
        loss = cross_entropy(x, target)
    with Seeing() as seeing:
        loss.backward()
    assert torch.ops.aten._log_softmax.default in seeing.ops
    torch.testing.assert_close(x.grad, expect(logits, target)[1])
    assert kernels.counts == (1, 0)


class Seeing(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


# -- Calls that don't --------------------------------------------------------------------------------


def _seen(x, y):
    with Seeing() as seeing:
        loss = cross_entropy(x, y)
    assert torch.ops.aten._log_softmax.default in seeing.ops
    return loss


class Tagged(torch.Tensor):
    pass


WAYS = {
    "float32 logits": lambda x, y: cross_entropy(x.float(), y),
    "classes apart": lambda x, y: cross_entropy(x.t().contiguous().t(), y),
    "images": lambda x, y: cross_entropy(x.t().contiguous().view(1, 9, 3, 4), y.view(1, 3, 4)),
    "one row": lambda x, y: torch.stack([cross_entropy(r, t) for r, t in zip(x[1:4], y[1:4], strict=True)]).mean(),
    "probabilities": lambda x, y: cross_entropy(x, x.detach().float().softmax(1)),
    "double weight": lambda x, y: cross_entropy(x.double(), y, torch.ones(9).double()).float(),
    "subclass": lambda x, y: cross_entropy(x.as_subclass(Tagged), y).as_subclass(torch.Tensor),
    "mode": _seen,
    "vmap": lambda x, y: torch.vmap(cross_entropy)(x.view(3, 4, 9), y.view(3, 4)).mean(),
    "compile": lambda x, y: torch.compile(lambda *a: cross_entropy(*a), backend="aot_eager", fullgraph=True)(x, y),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_transforms if name == "vmap" else ()) for name in WAYS]
)
def test_a_call_that_goes_by_torchs_ops(kernels, name):
    logits, target = arguments(12, 9)
    loss, gradient = run(logits, target, loss_of=WAYS[name])
    assert loss.dtype is FP32
    assert gradient.dtype is BF16
    assert gradient.isfinite().all()
    assert kernels.counts == (0, 0)
    if name in ("float32 logits", "classes apart", "images", "subclass", "mode", "compile"):
        torch.testing.assert_close((loss, gradient), expect(logits, target))
    torch._dynamo.reset()


def test_few_logits_go_by_torchs_ops(kernels, monkeypatch):
    logits, target = arguments(12, 9)
    monkeypatch.setattr(fused, "MINIMUM", logits.numel() + 1)
    run(logits, target)
    assert kernels.counts == (0, 0)
    monkeypatch.setattr(fused, "MINIMUM", logits.numel())
    run(logits, target)
    assert kernels.counts == (1, 1)


def test_an_empty_batch(kernels):
    loss, gradient = run(*arguments(0, 9))
    assert loss.isnan()
    assert gradient.shape == (0, 9)
    assert kernels.counts == (0, 0)


def test_transforms_and_forward_mode(kernels):
    logits, target = arguments(12, 9)
    with mpamp.autocast("cpu", BF16):
        gradient = torch.func.grad(cross_entropy)(logits, target)
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(cross_entropy(forward_ad.make_dual(logits, logits), target)).tangent
    torch.testing.assert_close(gradient, expect(logits, target)[1])
    torch.testing.assert_close(tangent, (gradient.float() * logits.float()).sum(), rtol=1e-2, atol=1e-2)
    assert kernels.counts == (0, 0)


def test_tracers_record_torchs_ops(kernels):
    logits, target = arguments(12, 9)

    class Loss(torch.nn.Module):
        def forward(self, x, y):
            with mpamp.autocast("cpu", BF16, cache_enabled=False):
                return cross_entropy(x, y)

    def loss_of(x, y):
        return cross_entropy(x, y)

    expected = expect(logits, target)[0]
    with mpamp.autocast("cpu", BF16, cache_enabled=False):
        traced = torch.jit.trace(cross_entropy, (logits, target), check_trace=False)  # checks run it untraced
        graph = torch.fx.experimental.proxy_tensor.make_fx(loss_of)(logits, target)
        before = torch.fx.experimental.proxy_tensor.make_fx(loss_of, pre_dispatch=True)(logits, target)
    exported = torch.export.export(Loss(), (logits, target)).module()
    with torch._subclasses.FakeTensorMode() as mode, mpamp.autocast("cpu", BF16):
        assert cross_entropy(mode.from_tensor(logits), mode.from_tensor(target)).dtype is FP32
    assert kernels.counts == (0, 0)
    for program in (traced, graph, before, exported):
        torch.testing.assert_close(program(logits, target), expected)


def test_what_torch_refuses_it_refuses_here(kernels):
    logits, target = arguments(12, 9)
    with mpamp.autocast("cpu", BF16):
        for wrong in (target[:5], target.int(), target.float()):
            with pytest.raises((RuntimeError, ValueError)):
                cross_entropy(logits, wrong)
        with pytest.raises(RuntimeError, match="requires_grad"):
            cross_entropy(logits, target, torch.rand(9, requires_grad=True))
        with pytest.raises(RuntimeError, match="label_smoothing"):
            cross_entropy(logits, target, label_smoothing=1.5)
        with pytest.raises(RuntimeError, match="weight"):
            cross_entropy(logits, target, torch.ones(8))
        with pytest.raises(IndexError, match="out of bounds"):
            cross_entropy(logits, target + 9)
    assert kernels.forwards <= 1


@pytest.mark.parametrize("policy", ["lower_precision_fp", "fallthrough"])
def test_a_rule_that_asks_for_no_float32_has_none(kernels, policy):
    logits, target = arguments(12, 9)
    with mpamp.autocast("cpu", BF16, ops={"cross_entropy_loss": policy, "@losses": "fallthrough"}):
        assert cross_entropy(logits, target).dtype is BF16
    assert kernels.counts == (0, 0)


def test_a_recording_of_a_graph_goes_by_torchs_ops(kernels, monkeypatch):
    monkeypatch.setattr(registry, "_capture_check", lambda backend: lambda: True)
    logits, target = arguments(12, 9)
    torch.testing.assert_close(run(logits, target), expect(logits, target))
    assert kernels.counts == (0, 0)


# -- Where there are kernels -------------------------------------------------------------------------


def test_the_backends_that_say_so_have_them(monkeypatch):
    assert losses.fused(OP, CudaBackend()) is not None
    assert losses.fused(OP, XpuBackend()) is not None
    assert losses.fused(OP, CpuBackend()) is None
    assert losses.fused("aten::nll_loss", CudaBackend()) is None


@pytest.mark.parametrize(("value", "is_on"), [("0", False), ("1", True), (None, True)])
def test_one_variable_turns_them_off(monkeypatch, value, is_on):
    monkeypatch.delenv("MPAMP_FUSED_LOSS", raising=False)
    if value is not None:
        monkeypatch.setenv("MPAMP_FUSED_LOSS", value)
    losses.is_on.cache_clear()
    assert (losses.fused(OP, CudaBackend()) is not None) == is_on
    monkeypatch.undo()
    losses.is_on.cache_clear()


def test_without_triton_there_are_none(kernels, monkeypatch):
    monkeypatch.setattr(fused, "_works", WORKS)
    monkeypatch.setattr(fused, "_has_triton", lambda: False)
    WORKS.cache_clear()
    logits, target = arguments(12, 9)
    torch.testing.assert_close(run(logits, target), expect(logits, target))
    assert kernels.counts == (0, 0)
    WORKS.cache_clear()


def test_triton_that_fails_is_said_once_and_done_without(kernels, monkeypatch):
    def fail(*args):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(fused, "_works", WORKS)
    monkeypatch.setattr(fused, "_has_triton", lambda: True)
    monkeypatch.setattr(kernels, "forward", fail, raising=False)
    WORKS.cache_clear()
    logits, target = arguments(12, 9)
    with pytest.warns(MpampWarning, match="Failed to find C compiler") as caught:
        found = run(logits, target), run(logits, target)
    assert len(caught) == 1
    torch.testing.assert_close(found, (expect(logits, target),) * 2)
    WORKS.cache_clear()


def test_no_other_kernel_asks(kernels):
    cpu = device_state("cpu")
    sources = {name: kernel_source(find_overload(name)) for name in cpu.table if find_overload(name) is not None}
    assert not [name for name, source in sources.items() if "_fused" in source]
