"""The Triton kernels of the cross entropy, against torch's ops in float32 rounded once.

Where there is no card, Triton's interpreter runs them: ``TRITON_INTERPRET=1 pytest tests/engine/losses``.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn.functional import cross_entropy

import mpamp
from mpamp.engine.losses import cross_entropy as losses
from tests import processes

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BF16, HALF = torch.bfloat16, torch.float16
DTYPES = pytest.mark.parametrize("dtype", [BF16, HALF], ids=str)
SHAPES = [(33, 5), (9, 4096), (4, 9001)] if IS_INTERPRETED else [(33, 5), (300, 4096), (257, 50257), (64, 256000)]

if not IS_INTERPRETED:
    pytestmark = pytest.mark.accelerator


@pytest.fixture
def device() -> str:
    pytest.importorskip("triton")
    here = None if IS_INTERPRETED else torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if here is None else here.type


@pytest.fixture
def kernels(device):
    from mpamp.engine.losses import kernels

    return kernels


def arguments(shape, dtype, device, *, has_weights=False, spread=4.0):
    torch.manual_seed(0)
    rows, classes = shape
    logits = (torch.randn(shape, device=device) * spread).to(dtype)
    target = torch.randint(classes, (rows,), device=device)
    target[::5] = -100
    return logits, target, torch.rand(classes, device=device) if has_weights else None


def assert_close(loss, gradient, expected, expected_gradient):
    dtype = gradient.dtype
    torch.testing.assert_close(loss, expected, rtol=2e-6, atol=2e-6, equal_nan=True)
    rounded = expected_gradient.to(dtype)
    torch.testing.assert_close(gradient, rounded, rtol=torch.finfo(dtype).eps, atol=1e-7, equal_nan=True)
    # Float32's own rounding errors decide where a value is half way between two of 16 bits, and nowhere else.
    if not (IS_INTERPRETED and dtype is BF16):  # the interpreter cuts off
        same = (gradient == rounded) | (gradient.isnan() & rounded.isnan())
        assert same.float().mean() > 0.99


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_weights", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_rows_and_gradients_are_those_of_float32(kernels, device, dtype, shape, has_weights, smoothing):
    logits, target, weight = arguments(shape, dtype, device, has_weights=has_weights)
    upstream = torch.randn(shape[0], device=device)
    reference = logits.float().requires_grad_()
    expected = cross_entropy(reference, target, weight, reduction="none", label_smoothing=smoothing)
    expected.backward(upstream)

    loss, used, tops, log_sums = kernels.forward(logits, target, weight, -100, smoothing)
    gradient = kernels.backward(logits, target, weight, upstream, tops, log_sums, -100, smoothing)

    assert_close(loss, gradient, expected.detach(), reference.grad)
    is_used = target != -100
    assert torch.equal(used != 0, is_used)
    assert gradient[~is_used].count_nonzero() == 0


@DTYPES
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_infinities_and_nans_are_where_float32_has_them(kernels, device, dtype, smoothing):
    logits, target, _ = arguments((9, 9000), dtype, device)
    infinity = float("inf")
    target[:] = torch.tensor([3, 1, 2, 8999, -100, 4, 4, -100, 7], device=device)
    logits[0, 0], logits[1, 1] = -infinity, -infinity
    logits[2] = -infinity
    logits[3, :5000] = -infinity
    logits[4] = -infinity
    logits[5, 0], logits[6, 0], logits[7, 8999] = float("nan"), infinity, float("nan")
    logits[8] += 1000
    upstream = torch.ones(9, device=device)
    reference = logits.float().requires_grad_()
    expected = cross_entropy(reference, target, reduction="none", label_smoothing=smoothing)
    expected.backward(upstream)

    loss, _, tops, log_sums = kernels.forward(logits, target, None, -100, smoothing)
    gradient = kernels.backward(logits, target, None, upstream, tops, log_sums, -100, smoothing)

    assert loss.isnan().tolist() == [False, False, True, False, False, True, True, False, False]
    assert_close(loss, gradient, expected.detach(), reference.grad)


@DTYPES
def test_rows_that_lie_apart(kernels, device, dtype):
    wide, target, _ = arguments((20, 4100), dtype, device)
    logits = wide[:, 3:4003]
    target %= 4000
    upstream = torch.tensor(65536.0, device=device)
    reference = logits.float().requires_grad_()
    expected = cross_entropy(reference, target, reduction="none", ignore_index=2)
    expected.backward(upstream.expand(20))

    loss, _, tops, log_sums = kernels.forward(logits, target, None, 2, 0.0)
    gradient = kernels.backward(logits, target, None, upstream, tops, log_sums, 2, 0.0)

    assert gradient.is_contiguous()
    assert_close(loss, gradient, expected.detach(), reference.grad)


@pytest.mark.skipif(IS_INTERPRETED, reason="regions take the kernels on a card")
@DTYPES
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("has_weights", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_region_takes_them(device, dtype, reduction, has_weights, smoothing):
    logits, target, weight = arguments((700, 50257), dtype, device, has_weights=has_weights)
    assert logits.numel() >= losses.MINIMUM
    settings = {"reduction": reduction, "label_smoothing": smoothing}
    reference = logits.float().requires_grad_()
    expected = cross_entropy(reference, target, weight, **settings)
    expected.sum().mul(1024).backward()

    logits.requires_grad_()
    with mpamp.autocast(device, dtype):
        loss = cross_entropy(logits, target, weight, **settings)
    assert type(loss.grad_fn).__name__.startswith("_CrossEntropy" if reduction != "none" else "View")
    loss.sum().mul(1024).backward()

    assert loss.dtype is torch.float32
    assert_close(loss.detach(), logits.grad, expected.detach(), reference.grad)


@pytest.mark.skipif(IS_INTERPRETED, reason="regions take the kernels on a card")
def test_nothing_but_ignored_rows(device):
    logits, target, _ = arguments((700, 50257), BF16, device)
    target[:] = -100
    logits.requires_grad_()
    with mpamp.autocast(device, BF16):
        loss = cross_entropy(logits, target)
    loss.backward()
    assert loss.isnan()
    assert logits.grad.count_nonzero() == 0


@pytest.mark.skipif(IS_INTERPRETED, reason="regions take the kernels on a card")
def test_classes_in_the_middle_of_a_transposed_batch(device):
    logits, target, _ = arguments((1024, 40000), BF16, device)
    expected = cross_entropy(logits.float(), target)
    whole = logits.view(2, 512, 40000).requires_grad_()
    with mpamp.autocast(device, BF16):
        loss = cross_entropy(whole.transpose(1, 2), target.view(2, 512))
    assert type(loss.grad_fn).__name__.startswith("_CrossEntropy")
    loss.backward()
    assert whole.grad.is_contiguous()
    torch.testing.assert_close(loss, expected, rtol=2e-6, atol=0)


@pytest.mark.skipif(IS_INTERPRETED, reason="it would not be measured")
def test_memory_is_the_gradients(device):
    logits, target, _ = arguments((2048, 50257), BF16, device)
    logits.requires_grad_()

    def step():
        logits.grad = None
        with mpamp.autocast(device, BF16):
            cross_entropy(logits, target).backward()

    step()
    module = getattr(torch, device)
    logits.grad = None
    before = module.memory_allocated()
    module.reset_peak_memory_stats()
    step()
    assert module.max_memory_allocated() - before < 1.1 * logits.numel() * 2


@pytest.mark.skipif(IS_INTERPRETED, reason="it would not be on a device")
def test_double_backward(device):
    logits, target, _ = arguments((700, 50257), BF16, device)
    found = []
    for is_region in (False, True):
        x = logits.clone().requires_grad_()
        with mpamp.autocast(device, BF16, enabled=is_region):
            loss = cross_entropy(x if is_region else x.float(), target)
        (first,) = torch.autograd.grad(loss * 1000, x, create_graph=True)
        (second,) = torch.autograd.grad(first.float().square().sum(), x)
        found.append((first.detach(), second))
    torch.testing.assert_close(found[1], found[0], rtol=2**-7, atol=1e-6)


_OUT_OF_RANGE = """
import torch, mpamp
device = torch.accelerator.current_accelerator().type
logits = torch.zeros(200, 50257, dtype=torch.bfloat16, device=device)
target = torch.zeros(200, dtype=torch.int64, device=device)
with mpamp.autocast(device, torch.bfloat16):
    torch.nn.functional.cross_entropy(logits, target).item()
    target[7] = {target}
    torch.nn.functional.cross_entropy(logits, target).item()
"""


@pytest.mark.skipif(IS_INTERPRETED, reason="it keeps no assertion")
@pytest.mark.skipif(torch.version.hip is not None, reason="ROCm has no assertions on the device")
@pytest.mark.parametrize("target", [50257, -1])
def test_a_target_that_is_no_class_is_an_error(device, target):
    # An assertion on the device ends the process's use of it.
    done = processes.python("-c", _OUT_OF_RANGE.format(target=target))
    assert done.returncode != 0
    assert "assert" in done.stderr
