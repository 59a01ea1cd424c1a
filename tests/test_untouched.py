"""In-place and out= calls, and float64, integer, complex and quantized arguments, are left alone."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

import mpamp
from mpamp.oplists import load_table
from tests.parity.arguments import Call, Maker, arguments, call
from tests.parity.observe import Recorder, can_be_called, device_of, is_here, overload, place_of, stand_ins, tensors_at

BRAIN, HALF, FULL, DOUBLE = torch.bfloat16, torch.float16, torch.float32, torch.float64
LOWER = [BRAIN, HALF]
PLACES = [place for place in map(place_of, ("cpu", "cuda", "xpu")) if is_here(place)]
Case = Callable[[Maker], Call]
_OVERLOAD = re.compile(r"\.\w+\(")  # torch passes norm on to the overload that takes a dtype, with the same dtype


def _seen(case: Case, place: str, dtypes: list[torch.dtype], lower: torch.dtype | None) -> tuple[Any, ...]:
    """Return what a call came down to and gave, in a region of ``lower`` or outside of any."""
    device = device_of(place)
    with tensors_at(place), stand_ins(place), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (function, *args), kwargs = case(Maker(device, dtypes))
        region = contextlib.nullcontext() if lower is None else mpamp.autocast(device, lower)
        with region, Recorder(moves=True) as recorder:
            try:
                out: Any = [t.dtype for t in tree_leaves(function(*args, **kwargs)) if isinstance(t, torch.Tensor)]
            except Exception as error:
                out = str(error)
    return [_OVERLOAD.sub("(", op) for op in recorder.ops], out


def _is_left_alone(case: Case, place: str, dtypes: list[torch.dtype], lower: torch.dtype) -> None:
    ops, out = _seen(case, place, dtypes, None)
    assert ops
    assert place != "cpu" or isinstance(out, list), out  # without a card, some ops get no further than their kernel
    assert _seen(case, place, dtypes, lower) == (ops, out)


# -- In place ------------------------------------------------------------------------------------------

_UNARY = "exp log log10 log1p log2 expm1 acos asin cosh sinh tan erfinv reciprocal rsqrt sigmoid relu"
IN_PLACE: dict[str, Case] = {
    **{f"{name}_": lambda t, name=name: call(getattr(torch.Tensor, f"{name}_"), t(4, 4)) for name in _UNARY.split()},
    "add_": lambda t: call(torch.Tensor.add_, t(4, 4), t(4, 4)),
    "addbmm_": lambda t: call(torch.Tensor.addbmm_, t(3, 5), t(2, 3, 4), t(2, 4, 5)),
    "addcdiv_": lambda t: call(torch.Tensor.addcdiv_, t(4), t(4), t(4)),
    "addcmul_": lambda t: call(torch.Tensor.addcmul_, t(4), t(4), t(4)),
    "addmm_": lambda t: call(torch.Tensor.addmm_, t(3, 5), t(3, 4), t(4, 5)),
    "addmv_": lambda t: call(torch.Tensor.addmv_, t(3), t(3, 4), t(4)),
    "addr_": lambda t: call(torch.Tensor.addr_, t(3, 4), t(3), t(4)),
    "atan2_": lambda t: call(torch.Tensor.atan2_, t(4), t(4)),
    "baddbmm_": lambda t: call(torch.Tensor.baddbmm_, t(2, 3, 5), t(2, 3, 4), t(2, 4, 5)),
    "cumprod_": lambda t: call(torch.Tensor.cumprod_, t(4, 4), 0),
    "cumsum_": lambda t: call(torch.Tensor.cumsum_, t(4, 4), 0),
    "index_copy_": lambda t: call(torch.Tensor.index_copy_, t(4, 4), 0, t.ints(0, 2), t(2, 4)),
    "index_put_": lambda t: call(torch.Tensor.index_put_, t(4, 4), (t.ints(0, 2),), t(2, 4)),
    "lerp_": lambda t: call(torch.Tensor.lerp_, t(4), t(4), 0.5),
    "mul_": lambda t: call(torch.Tensor.mul_, t(4, 4), t(4, 4)),
    "pow_": lambda t: call(torch.Tensor.pow_, t(4, 4), 2),
    "renorm_": lambda t: call(torch.Tensor.renorm_, t(4, 4), 2, 0, 1.0),
    "scatter_add_": lambda t: call(torch.Tensor.scatter_add_, t(4, 4), 0, t.zeros(2, 4), t(2, 4)),
}


@pytest.mark.parametrize("lower", LOWER, ids=str)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name: str, place: str, lower: torch.dtype) -> None:
    _is_left_alone(IN_PLACE[name], place, [FULL], lower)


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_writes_to_its_tensor(name: str) -> None:
    (function, target, *args), kwargs = IN_PLACE[name](Maker("cpu", [FULL]))
    with mpamp.autocast("cpu"):
        assert function(target, *args, **kwargs) is target
    assert target.dtype is FULL


@pytest.mark.parametrize("name", ["add_", "mul_", "addcmul_"])
def test_in_place_with_lower_precision_arguments(name: str) -> None:
    _is_left_alone(IN_PLACE[name], "cpu", [FULL, BRAIN], BRAIN)
    _is_left_alone(IN_PLACE[name], "cpu", [BRAIN, FULL], BRAIN)


def test_functions_of_torch_nn_in_place() -> None:
    x = torch.ones(4)
    with mpamp.autocast("cpu", ops={"silu": "lower_precision_fp"}):
        assert F.silu(x).dtype is BRAIN
        assert F.silu(x, inplace=True) is x
    assert x.dtype is FULL


# -- With out= -----------------------------------------------------------------------------------------


def _out(function: Any, shape: tuple[int, ...], *args: Callable[[Maker], Any], dtype: torch.dtype = FULL) -> Case:
    def case(t: Maker) -> Call:
        made = [make(t) for make in args]
        return call(function, *made, out=torch.empty(shape, device=t.device, dtype=dtype))

    return case


def _t(*shape: int) -> Callable[[Maker], torch.Tensor]:
    return lambda t: t(*shape)


def _is(value: Any) -> Callable[[Maker], Any]:
    return lambda t: value


OUT: dict[str, Case] = {
    "addmm": _out(torch.addmm, (3, 5), _t(3, 5), _t(3, 4), _t(4, 5)),
    "atan2": _out(torch.atan2, (4,), _t(4), _t(4)),
    "baddbmm": _out(torch.baddbmm, (2, 3, 5), _t(2, 3, 5), _t(2, 3, 4), _t(2, 4, 5)),
    "bmm": _out(torch.bmm, (2, 3, 5), _t(2, 3, 4), _t(2, 4, 5)),
    "cat": _out(torch.cat, (4, 3), lambda t: [t(2, 3), t(2, 3)]),
    "cumsum": _out(torch.cumsum, (4, 4), _t(4, 4), _is(0)),
    "dot": _out(torch.dot, (), _t(4), _t(4)),
    "exp": _out(torch.exp, (4, 4), _t(4, 4)),
    "fft": _out(torch.fft.fft, (4, 4), _t(4, 4), dtype=torch.complex64),
    "inv": _out(torch.linalg.inv, (4, 4), _t(4, 4)),
    "log": _out(torch.log, (4, 4), _t(4, 4)),
    "logsumexp": _out(torch.logsumexp, (4,), _t(4, 4), _is(0)),
    "matmul": _out(torch.matmul, (3, 5), _t(3, 4), _t(4, 5)),
    "mm": _out(torch.mm, (3, 5), _t(3, 4), _t(4, 5)),
    "mv": _out(torch.mv, (3,), _t(3, 4), _t(4)),
    "pow": _out(torch.pow, (4, 4), _t(4, 4), _is(2)),
    "rsqrt": _out(torch.rsqrt, (4, 4), _t(4, 4)),
    "softmax": _out(torch.softmax, (4, 4), _t(4, 4), _is(0)),
    "stack": _out(torch.stack, (2, 2, 3), lambda t: [t(2, 3), t(2, 3)]),
    "sum": _out(torch.sum, (4,), _t(4, 4), _is([0])),
    "mse_loss": _out(torch.ops.aten.mse_loss.out, (), _t(4), _t(4), _is(1)),
    "huber_loss": _out(torch.ops.aten.huber_loss.out, (), _t(4), _t(4), _is(1), _is(1.0)),
    "vector_norm": _out(torch.linalg.vector_norm, (), _t(4)),
}


@pytest.mark.parametrize("lower", LOWER, ids=str)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", OUT)
def test_out(name: str, place: str, lower: torch.dtype) -> None:
    _is_left_alone(OUT[name], place, [FULL], lower)


@pytest.mark.parametrize("name", OUT)
def test_out_is_what_is_returned(name: str) -> None:
    (function, *args), kwargs = OUT[name](Maker("cpu", [FULL]))
    with mpamp.autocast("cpu", HALF):
        assert function(*args, **kwargs) is kwargs["out"]


# -- By dtype ------------------------------------------------------------------------------------------


def _call_of(op: str) -> Case:
    """Return the arguments by which the parity tests call an overload."""

    def case(t: Maker) -> Call:
        args, kwargs = arguments(overload(op), t)
        return (overload(op), *args), kwargs

    return case


ROWS = [(place, op) for place in PLACES for op in load_table("default", device_of(place)) if can_be_called(op, place)]


@pytest.mark.parametrize(("place", "op"), ROWS)
def test_float64_row(place: str, op: str) -> None:
    """Every row of the default table leaves a call in float64 alone, whether the op can run it or not."""
    for lower in LOWER:
        assert _seen(_call_of(op), place, [DOUBLE], lower) == _seen(_call_of(op), place, [DOUBLE], None)


FUNCTIONS: dict[str, Case] = {
    "add": lambda t: call(torch.add, t(4), t(4)),
    "addmm": lambda t: call(torch.addmm, t(3, 5), t(3, 4), t(4, 5)),
    "bmm": lambda t: call(torch.bmm, t(2, 3, 4), t(2, 4, 5)),
    "cat": lambda t: call(torch.cat, [t(2, 3), t(2, 3)]),
    "conv1d": lambda t: call(F.conv1d, t(2, 3, 5), t(3, 3, 2), t(3)),
    "conv2d": lambda t: call(F.conv2d, t(2, 3, 5, 5), t(3, 3, 2, 2), t(3)),
    "cumsum": lambda t: call(torch.cumsum, t(4), 0),
    "dot": lambda t: call(torch.dot, t(4), t(4)),
    "einsum": lambda t: call(torch.einsum, "ij,jk->ik", t(2, 3), t(3, 4)),
    "exp": lambda t: call(torch.exp, t(4)),
    "fft": lambda t: call(torch.fft.fft, t(4)),
    "inv": lambda t: call(torch.linalg.inv, t(4, 4)),
    "linear": lambda t: call(F.linear, t(2, 4), t(3, 4), t(3)),
    "log": lambda t: call(torch.log, t(4)),
    "matmul": lambda t: call(torch.matmul, t(3, 4), t(4, 5)),
    "mm": lambda t: call(torch.mm, t(3, 4), t(4, 5)),
    "mul": lambda t: call(torch.mul, t(4), t(4)),
    "pow": lambda t: call(torch.pow, t(4), 2),
    "prod": lambda t: call(torch.prod, t(4)),
    "stack": lambda t: call(torch.stack, [t(2, 3), t(2, 3)]),
    "sum": lambda t: call(torch.sum, t(4)),
    "vector_norm": lambda t: call(torch.linalg.vector_norm, t(4)),
    "cosine_similarity": lambda t: call(F.cosine_similarity, t(4, 4), t(4, 4)),
    "group_norm": lambda t: call(F.group_norm, t(2, 4, 3), 2, t(4), t(4)),
    "huber_loss": lambda t: call(F.huber_loss, t(4), t(4)),
    "l1_loss": lambda t: call(F.l1_loss, t(4), t(4)),
    "layer_norm": lambda t: call(F.layer_norm, t(2, 4), (4,), t(4), t(4)),
    "mse_loss": lambda t: call(F.mse_loss, t(4), t(4)),
    "softmax": lambda t: call(torch.softmax, t(4), 0),
    "softplus": lambda t: call(F.softplus, t(4)),
}
ONLY_REAL = ["cosine_similarity", "group_norm", "huber_loss", "layer_norm", "mse_loss", "softmax", "softplus"]
ONLY_FLOATING = [*ONLY_REAL, "inv", "vector_norm", "l1_loss"]


@pytest.mark.parametrize("lower", LOWER, ids=str)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_float64(name: str, place: str, lower: torch.dtype) -> None:
    _is_left_alone(FUNCTIONS[name], place, [DOUBLE], lower)


@pytest.mark.parametrize("lower", LOWER, ids=str)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in ONLY_REAL])
def test_complex(name: str, place: str, dtype: torch.dtype, lower: torch.dtype) -> None:
    _is_left_alone(FUNCTIONS[name], place, [dtype], lower)


def _integers(case: Case, dtype: torch.dtype) -> Case:
    """Return a case with its floating tensors replaced by integer ones."""

    def replaced(t: Maker) -> Call:
        args, kwargs = case(t)
        return tree_map_only(torch.Tensor, lambda x: torch.ones_like(x, dtype=dtype), args), kwargs

    return replaced


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in ONLY_FLOATING])
def test_integers(name: str, place: str, dtype: torch.dtype) -> None:
    case = _integers(FUNCTIONS[name], dtype)
    for lower in LOWER:
        assert _seen(case, place, [FULL], lower) == _seen(case, place, [FULL], None)


@pytest.mark.parametrize("lower", LOWER, ids=str)
def test_integer_arguments_beside_floating_ones(lower: torch.dtype) -> None:
    classes, rows = torch.zeros(4, dtype=torch.int64), torch.tensor([0, 2])
    x = torch.ones(4, 5)
    with mpamp.autocast("cpu", lower), Recorder() as recorder:
        assert F.cross_entropy(x.to(lower), classes).dtype is FULL
        assert x.index_copy(0, rows, x[:2].to(lower)).dtype is FULL
    assert all("int64" in op for op in recorder.ops if "nll_loss" in op or "index_copy" in op)


# -- Quantized -----------------------------------------------------------------------------------------


def _quantized(*shape: int) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(shape), 0.1, 0, torch.quint8)


QUANTIZED: dict[str, Case] = {
    "adaptive_avg_pool3d": lambda t: call(F.adaptive_avg_pool3d, _quantized(1, 2, 4, 4, 4), 2),
    "avg_pool3d": lambda t: call(F.avg_pool3d, _quantized(1, 2, 4, 4, 4), 2),
    "cat": lambda t: call(torch.cat, [_quantized(2, 3), _quantized(2, 3)]),
    "interpolate": lambda t: call(F.interpolate, _quantized(1, 2, 4, 4), 8),
    "relu": lambda t: call(torch.relu, _quantized(4)),
    "stack": lambda t: call(torch.stack, [_quantized(2, 3), _quantized(2, 3)]),
}


@pytest.mark.parametrize("lower", LOWER, ids=str)
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized(name: str, lower: torch.dtype) -> None:
    _is_left_alone(QUANTIZED[name], "cpu", [FULL], lower)


# -- The comparison can fail ---------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_float32_is_not_left_alone(place: str) -> None:
    with pytest.raises(AssertionError):
        _is_left_alone(FUNCTIONS["mm"], place, [FULL], BRAIN)
