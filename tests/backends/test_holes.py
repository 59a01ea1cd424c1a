"""What raises under ``torch.autocast`` for its dtypes alone, and works in float32, works in a region."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import mpamp
from tests.torches import GROUPS_ON_HOST, HAS_LANCZOS

BRAIN, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
LOWER = [BRAIN, HALF]
A = torch.tensor([[1.0, 0.5, 0.25, 0.0], [0.5, 1.0, 0.0, 0.75], [0.0, 0.25, 1.0, 0.5], [0.5, 0.0, 0.5, 1.0]])
ROWS = torch.tensor([2, 0])
Case = Callable[[Any, Any], torch.Tensor]
"""The call, by what gives a tensor of numbers the first dtype and the second."""


def _grouped(a: Any, b: Any) -> torch.Tensor:
    x, experts = torch.arange(128.0).reshape(8, 16) / 128, torch.arange(1024.0).reshape(2, 16, 32) / 1024
    return torch._grouped_mm(a(x), b(experts), offs=torch.tensor([4, 8], dtype=torch.int32))


def _bins(a: Any, b: Any) -> torch.Tensor:
    return torch.histogramdd(a(A[:, :2]), bins=[2, 2], weight=b(torch.ones(4))).hist


CASES: dict[str, tuple[Case, torch.dtype | None]] = {
    "_grouped_mm": (_grouped, None),
    "multi_dot": (lambda a, b: torch.linalg.multi_dot([a(A), b(A), A]), None),
    "chain_matmul": (lambda a, b: torch.chain_matmul(a(A), b(A), A), None),
    "tensordot": (lambda a, b: torch.tensordot(a(A), b(A), dims=1), None),
    "inner": (lambda a, b: torch.inner(a(A), b(A)), None),
    "mv": (lambda a, b: torch.mv(a(A), b(A[0])), FULL),
    "addmv": (lambda a, b: torch.addmv(A[0], a(A), b(A[0])), FULL),
    "csr @ dense": (lambda a, b: a(A).to_sparse_csr() @ b(A), FULL),
    "dense @ csr": (lambda a, b: a(A) @ b(A).to_sparse_csr(), FULL),
    "csr @ csr": (lambda a, b: (a(A).to_sparse_csr() @ b(A).to_sparse_csr()).to_dense(), FULL),
    "csc @ dense": (lambda a, b: a(A).to_sparse_csc() @ b(A), FULL),
    "bsr @ dense": (lambda a, b: a(A).to_sparse_bsr((2, 2)) @ b(A), FULL),
    "csr, vector": (lambda a, b: a(A).to_sparse_csr() @ b(A[0]), FULL),
    "addmm of csr": (lambda a, b: torch.addmm(A, a(A).to_sparse_csr(), b(A)), FULL),
    "linear of csr": (lambda a, b: F.linear(a(A), b(A).to_sparse_csr()), FULL),
    "sparse.mm": (lambda a, b: torch.sparse.mm(a(A).to_sparse_csr(), b(A)), FULL),
    "sparse.mm, reduced": (lambda a, b: torch.sparse.mm(a(A).to_sparse_csr(), b(A), "sum"), FULL),
    "sparse.sampled_addmm": (
        lambda a, b: torch.sparse.sampled_addmm(a(A).to_sparse_csr(), b(A), a(A)).to_dense(),
        FULL,
    ),
    "coo @ coo": (lambda a, b: (a(A).to_sparse() @ b(A).to_sparse()).to_dense(), FULL),
    "coo @ dense": (lambda a, b: a(A).to_sparse() @ b(A), None),
    "smm": (lambda a, b: torch.smm(a(A).to_sparse(), b(A)).to_dense(), FULL),
    "hspmm": (lambda a, b: torch.hspmm(a(A).to_sparse(), b(A)).to_dense(), FULL),
    "sspaddmm": (lambda a, b: torch.sspaddmm(a(A).to_sparse(), a(A).to_sparse(), b(A)).to_dense(), FULL),
    "sparse.softmax": (lambda a, b: torch.sparse.softmax(a(A).to_sparse(), 1).to_dense(), FULL),
    "sparse.log_softmax": (lambda a, b: torch.sparse.log_softmax(a(A).to_sparse(), 1).to_dense(), FULL),
    "lanczos": (lambda a, b: torch.ops.aten._upsample_lanczos2d_aa(a(A)[None, None], [2, 2], False), FULL),
    "view_as_complex": (lambda a, b: torch.view_as_real(torch.view_as_complex(a(A).reshape(4, 2, 2))), FULL),
    "histogramdd": (_bins, FULL),
    "special.i1": (lambda a, b: torch.special.i1(a(A)), FULL),
    "special.i1e": (lambda a, b: torch.special.i1e(a(A)), FULL),
    "put": (lambda a, b: a(A).put(ROWS, b(A[0, :2])), FULL),
    "index_reduce": (lambda a, b: a(A).index_reduce(0, ROWS, b(A[:2]), "amax"), FULL),
    "scatter, reduced": (lambda a, b: a(A).scatter(0, ROWS[None].expand(1, 2), b(A[:1, :2]), reduce="add"), FULL),
    "heaviside": (lambda a, b: torch.heaviside(a(A), b(A)), FULL),
    "meshgrid": (lambda a, b: torch.stack(torch.meshgrid(a(A[0]), b(A[1]), indexing="ij")), FULL),
    "cartesian_prod": (lambda a, b: torch.cartesian_prod(a(A[0]), b(A[1])), FULL),
    "_chunk_cat": (lambda a, b: torch._chunk_cat([a(A), b(A)], 0, 2), FULL),
    "isclose": (lambda a, b: torch.isclose(a(A), b(A)), torch.bool),
    "fake_quantize, by channel": (
        lambda a, b: torch.fake_quantize_per_channel_affine(
            a(A), b(A[0] + 0.5), torch.zeros(4, dtype=torch.int32), 0, 0, 255
        ),
        FULL,
    ),
    "fake_quantize, learnt": (
        lambda a, b: torch._fake_quantize_learnable_per_channel_affine(
            a(A), b(A[0] + 0.5), b(torch.zeros(4)), 0, 0, 255, 1.0
        ),
        FULL,
    ),
}
"""By name, the call, and the dtype that comes out of mixed arguments; None is the region's."""
if not HAS_LANCZOS:
    del CASES["lanczos"]
if not GROUPS_ON_HOST:
    del CASES["_grouped_mm"]
PAIRS = ["lower", "lower, float32", "float32, lower", "float32"]


@pytest.mark.filterwarnings(
    "ignore:.*(chain_matmul|index_reduce|Sparse|sparse csr|sparse bsr|sparse csc|torch.scatter with)"
)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("lower", LOWER, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_runs_with_any_two_dtypes(name: str, lower: torch.dtype, pair: str) -> None:
    case, mixed = CASES[name]
    first, second = (lower if part == "lower" else FULL for part in (pair.split(", ") * 2)[:2])
    expected = case(torch.clone, torch.clone)
    with mpamp.autocast("cpu", lower):
        found = case(lambda t: t.to(first), lambda t: t.to(second))
    if first is not second:
        assert found.dtype is (lower if mixed is None else mixed)
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.02, atol=0.02)


_SCALES = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
_ZEROS = torch.zeros(4, dtype=torch.float64)
_WITH_PARAMETERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "quantize_per_channel": lambda t: torch.quantize_per_channel(t, _SCALES, _ZEROS, 1, torch.quint8).dequantize(),
    "quantize_per_tensor, tensors": lambda t: torch.quantize_per_tensor(
        t, _SCALES[0], _ZEROS[0], torch.quint8
    ).dequantize(),
    "quantize_per_tensor, list": lambda t: torch.quantize_per_tensor([t], _SCALES[:1], _ZEROS[:1], torch.quint8)[
        0
    ].dequantize(),
    "fake_quantize": lambda t: torch.fake_quantize_per_tensor_affine(t, _SCALES[0], torch.tensor(0), 0, 255),
    "fake_quantize, learnt": lambda t: torch._fake_quantize_learnable_per_tensor_affine(
        t, _SCALES[:1], _ZEROS[:1], 0, 255
    ),
}


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation")
@pytest.mark.parametrize("lower", LOWER, ids=str)
@pytest.mark.parametrize("name", _WITH_PARAMETERS)
def test_scales_in_float64_are_numbers_of_the_op_s_own(name: str, lower: torch.dtype) -> None:
    """A float64 scale has the op take a 16-bit layer's result in float32, as a float32 one does."""
    call = _WITH_PARAMETERS[name]
    low = A.to(lower)
    with mpamp.autocast("cpu", lower):
        found = call(low)
        assert call(A.double()).dtype is torch.float64 if "fake" in name else True  # what it computes with says more
    assert found.dtype is FULL
    torch.testing.assert_close(found, call(low.float()))


@pytest.mark.filterwarnings("ignore:.*(Sparse|sparse csr)")
@pytest.mark.parametrize("lower", LOWER, ids=str)
def test_gradients_of_a_sparse_product(lower: torch.dtype) -> None:
    weight = torch.nn.Parameter(A.clone())
    with mpamp.autocast("cpu", lower):
        (A.to_sparse_csr() @ (weight @ A)).sum().backward()
    assert weight.grad is not None
    expected = torch.outer(A.sum(0), A.sum(1))
    torch.testing.assert_close(weight.grad, expected, rtol=0.02, atol=0.02)


# -- Sampling ------------------------------------------------------------------------------------------

SAMPLERS: dict[str, Case] = {
    "_standard_gamma": lambda a, b: torch._standard_gamma(a(A + 1)),
    "_sample_dirichlet": lambda a, b: torch._sample_dirichlet(a(A + 1)),
    "binomial": lambda a, b: torch.binomial(a(A * 8), b(A / 2)),
}


@pytest.mark.parametrize("lower", LOWER, ids=str)
@pytest.mark.parametrize("name", SAMPLERS)
def test_samples_as_float32_does(name: str, lower: torch.dtype) -> None:
    torch.manual_seed(0)
    expected = SAMPLERS[name](torch.clone, torch.clone)
    torch.manual_seed(0)
    with mpamp.autocast("cpu", lower):
        found = SAMPLERS[name](lambda t: t.to(lower), lambda t: t.to(lower))
    assert torch.equal(found, expected)  # the arguments are exact in 16 bits


@pytest.mark.parametrize("lower", LOWER, ids=str)
@pytest.mark.parametrize("law", [torch.distributions.Gamma, torch.distributions.Beta])
def test_distributions_of_activations(law: Any, lower: torch.dtype) -> None:
    weight = torch.nn.Parameter(A + 1)
    with mpamp.autocast("cpu", lower):
        law(weight @ A + 1, weight @ A + 1).rsample().sum().backward()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()


# -- Numbers that 16 bits can't hold -------------------------------------------------------------------

MASK = torch.tensor([True, False])
LOWEST = torch.finfo(FULL).min
FILLS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "masked_fill": lambda x, value: x.masked_fill(MASK, value),
    "index_fill": lambda x, value: x.index_fill(0, torch.tensor([0]), value),
    "scatter": lambda x, value: x.scatter(0, torch.tensor([0]), value),
}


@pytest.mark.parametrize("lower", LOWER, ids=str)
@pytest.mark.parametrize("name", FILLS)
def test_a_number_that_the_dtype_can_not_hold(name: str, lower: torch.dtype) -> None:
    too_large = [LOWEST, -LOWEST] + ([-1e9, 65520, 10**6] if lower is HALF else [])
    held = [0, 1, -3.5, True, float("-inf"), float("inf"), float("nan"), torch.finfo(lower).min]
    x = torch.tensor([1.0, 2.0], dtype=lower)
    for value in [*too_large, *held]:
        expected = FILLS[name](x.float(), value)
        with mpamp.autocast("cpu", lower):
            found = FILLS[name](x, value)
        assert found.dtype is (FULL if value in too_large else lower), value
        assert torch.equal(found.float().nan_to_num(7.0), expected.nan_to_num(7.0)), value


def test_a_mask_of_attention_scores() -> None:
    weight = torch.nn.Parameter(torch.eye(2))
    with mpamp.autocast("cpu", HALF):
        scores = (torch.eye(2) @ weight).masked_fill(MASK, LOWEST)
        scores.softmax(-1)[0, 1].backward()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("name", ["clamp", "constant_pad_nd", "threshold", "hardtanh", "fill.Scalar"])
def test_other_ops_hold_numbers_by_a_rule(name: str) -> None:
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "clamp": lambda x: x.clamp(min=-1e9, max=1e9),
        "constant_pad_nd": lambda x: F.pad(x, (1, 0), value=-1e9),
        "threshold": lambda x: F.threshold(x, 0.0, -1e9),
        "hardtanh": lambda x: F.hardtanh(x, -1e9, 1e9),
        "fill.Scalar": lambda x: torch.fill(x, -1e9),
    }
    x = torch.tensor([-1.0, 2.0])
    with mpamp.autocast("cpu", HALF, ops={name: "promote"}):
        assert torch.equal(calls[name](x.half()), calls[name](x))


# -- Observers and modules -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization")
@pytest.mark.parametrize("lower", LOWER, ids=str)
def test_an_observer_sees_activations(lower: torch.dtype) -> None:
    from torch.ao.quantization import FusedMovingAvgObsFakeQuantize

    observer, weight = FusedMovingAvgObsFakeQuantize(), torch.nn.Parameter(A.clone())
    with mpamp.autocast("cpu", lower):
        y = observer(A @ weight)
        y.sum().backward()
    assert y.dtype is FULL
    low, high = (A @ A).to(lower).float().aminmax()
    assert (observer.activation_post_process.min_val, observer.activation_post_process.max_val) == (low, high)
    assert weight.grad is not None


@pytest.mark.parametrize("given", [FULL, BRAIN, HALF], ids=str)
@pytest.mark.parametrize("lower", LOWER, ids=str)
def test_adaptive_log_softmax(lower: torch.dtype, given: torch.dtype) -> None:
    torch.manual_seed(0)
    module, x, target = torch.nn.AdaptiveLogSoftmaxWithLoss(32, 10, [3, 6]), torch.randn(10, 32), torch.arange(10)
    expected = module(x, target)
    with mpamp.autocast("cpu", lower):
        found = module(x.to(given), target)
        found.loss.backward()
    torch.testing.assert_close(found.output.float(), expected.output, rtol=0.05, atol=0.05)
    assert all(p.grad is not None for p in module.parameters())


def test_a_comparison_with_float32() -> None:
    with mpamp.autocast("cpu", BRAIN):
        assert torch.allclose((A @ A), (A.double() @ A.double()).float(), rtol=0.02)


@pytest.mark.parametrize("training", [True, False])
def test_rrelu_in_float16(training: bool) -> None:
    with mpamp.autocast("cpu", HALF):
        assert F.rrelu(-A.half(), training=training).dtype is FULL
