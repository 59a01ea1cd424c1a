"""``{"@buffer_writes": "promote"}``: writes into a tensor take the values in its dtype, where one asks for it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

import mpamp
from mpamp import OpTable, OpTableError, UnknownOpError
from mpamp.oplists import families
from mpamp.rules.eligibility import find_overload, full_name, is_in_place
from tests.parity.observe import FAKE, PLACES, device_of, is_here, tensors_at

BRAIN, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
WRITES = {"@buffer_writes": "promote"}
Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


def _setitem(b: torch.Tensor, i: Any, y: torch.Tensor) -> None:
    b[i] = y


WAYS: dict[str, Write] = {
    "x[index] = y": _setitem,
    "x[mask] = y": lambda b, i, y: _setitem(b, torch.ones(3, device=b.device).bool(), y),
    "addbmm_": lambda b, i, y: b.addbmm_(y[None], y[None]),
    "addmm_": lambda b, i, y: b.addmm_(y, y),
    "addmv_": lambda b, i, y: b[0].addmv_(y, y[0]),
    "addr_": lambda b, i, y: b.addr_(y[0], y[1]),
    "baddbmm_": lambda b, i, y: b[None].baddbmm_(y[None], y[None]),
    "heaviside_": lambda b, i, y: b.heaviside_(y),
    "index_add_": lambda b, i, y: b.index_add_(0, i, y),
    "index_copy_": lambda b, i, y: b.index_copy_(0, i, y),
    "index_put_": lambda b, i, y: b.index_put_((i,), y, accumulate=True),
    "index_reduce_": lambda b, i, y: b.index_reduce_(0, i, y, "amax"),
    "lerp_.Scalar": lambda b, i, y: b.lerp_(y, 0.5),
    "lerp_.Tensor": lambda b, i, y: b.lerp_(y, y),
    "masked_scatter_": lambda b, i, y: b.masked_scatter_(torch.ones(3, 3, device=b.device).bool(), y),
    "put_": lambda b, i, y: b.put_(i, y[0]),
    "scatter_.reduce": lambda b, i, y: b.scatter_(0, i.expand(3, 3), y, reduce="add"),
    "scatter_.src": lambda b, i, y: b.scatter_(0, i.expand(3, 3), y),
    "scatter_add_": lambda b, i, y: b.scatter_add_(0, i.expand(3, 3), y),
    "scatter_reduce_.two": lambda b, i, y: b.scatter_reduce_(0, i.expand(3, 3), y, "sum"),
}
CANNOT_FAKE = {"x[index] = y", "x[mask] = y", "addbmm_", "addmv_", "addr_", "baddbmm_", "put_"}
PAIRS = [(FULL, BRAIN), (FULL, HALF), (BRAIN, FULL), (HALF, FULL)]
"""The dtypes of the tensor written to and of the values."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "index_reduce")  # it is in beta
        warnings.filterwarnings("ignore", "The reduce argument of torch.scatter")
        yield


def _arguments(device: str, written: torch.dtype, values: torch.dtype) -> tuple[torch.Tensor, ...]:
    buffer = torch.zeros(3, 3, dtype=written, device=device)
    numbers = torch.arange(9.0, device=device).reshape(3, 3) / 4
    return buffer, torch.tensor([0, 2, 1], device=device), numbers.to(values)


def test_every_way_is_here() -> None:
    assert {name for name in WAYS if "=" not in name} == set(families()["buffer_writes"])
    assert all(is_in_place(op) for name in families()["buffer_writes"] if (op := find_overload(f"aten::{name}")))


@pytest.mark.parametrize(("written", "values"), PAIRS, ids=str)
@pytest.mark.parametrize("place", [p for p in PLACES if is_here(p)])
@pytest.mark.parametrize("way", WAYS)
def test_takes_values_of_another_dtype(way: str, place: str, written: torch.dtype, values: torch.dtype) -> None:
    if way in CANNOT_FAKE and place.startswith(FAKE):
        pytest.skip("looks for the device's library before anything else")
    device, lower = device_of(place), HALF if HALF in (written, values) else BRAIN
    with tensors_at(place):
        buffer, index, low = _arguments(device, written, values)
        with mpamp.autocast(device, lower, ops=WRITES):
            WAYS[way](buffer, index, low)
        assert buffer.dtype is written
        if not place.startswith(FAKE):
            expected, *_ = _arguments(device, written, values)
            WAYS[way](expected, index, low.to(written))
            assert torch.equal(buffer, expected)


# addr_ takes any two dtypes; AdaptiveLogSoftmaxWithLoss can't do without a row for index_copy_.
@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("addr_", "index_copy_")])
def test_is_refused_by_default_as_in_torch(way: str) -> None:
    with mpamp.autocast("cpu", BRAIN), pytest.raises(RuntimeError, match=r"(?i)dtype|type|heaviside"):
        WAYS[way](*_arguments("cpu", FULL, BRAIN))


@pytest.mark.parametrize("way", WAYS)
def test_a_float64_tensor_is_left_alone(way: str) -> None:
    buffer, index, y = _arguments("cpu", torch.float64, torch.float64)
    with mpamp.autocast("cpu", BRAIN, ops=WRITES):
        WAYS[way](buffer, index, y)
    assert buffer.dtype is torch.float64


def test_gradients_reach_the_values() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 3))
    with mpamp.autocast("cpu", BRAIN, ops=WRITES):
        buffer = torch.zeros(3, 3)
        buffer[torch.tensor([0, 2, 1])] = torch.eye(3) @ weight
        buffer.index_add_(0, torch.tensor([0]), (torch.eye(3) @ weight)[:1])
        buffer.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[2.0] * 3, [1.0] * 3, [1.0] * 3]


@pytest.mark.parametrize("way", WAYS)
def test_nothing_else_changes(way: str) -> None:
    """With tensors of one dtype the write is torch's own."""
    for dtype in (FULL, BRAIN):
        buffer, index, y = _arguments("cpu", dtype, dtype)
        expected = buffer.clone()
        with mpamp.autocast("cpu", BRAIN, ops=WRITES):
            WAYS[way](buffer, index, y)
        WAYS[way](expected, index, y)
        assert torch.equal(buffer, expected)


# -- The word ------------------------------------------------------------------------------------------


def test_goes_with_own_rules() -> None:
    with mpamp.autocast("cpu", BRAIN, ops={**WRITES, "softmax": "fp32", "index_add_": "fallthrough"}):
        buffer, index, low = _arguments("cpu", FULL, BRAIN)
        buffer[index] = low
        assert low.softmax(0).dtype is FULL
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is BRAIN
        with pytest.raises(RuntimeError, match="same scalar type"):
            buffer.index_add_(0, index, low)


def test_for_the_process() -> None:
    mpamp.set_op_rules("cpu", WRITES)
    try:
        with mpamp.autocast("cpu", BRAIN):
            buffer, index, low = _arguments("cpu", FULL, BRAIN)
            buffer[index] = low
            assert torch.equal(buffer[index], low.float())
    finally:
        mpamp.set_op_rules("cpu", None)


def test_a_family_is_a_rule_in_every_place_where_rules_are() -> None:
    exact = {f"{op}.default" if "." not in op else op: "promote" for op in families()["buffer_writes"]}
    table = OpTable(WRITES)
    assert table == OpTable(exact) == OpTable.from_toml('[ops]\n"@buffer_writes" = "promote"')
    assert OpTable({}).override(WRITES) == table


@pytest.mark.parametrize("family", families())
def test_every_family_can_be_named(family: str) -> None:
    found = {full_name(op) for op in families()[family] if find_overload(full_name(op)) is not None}
    assert set(OpTable({f"@{family}": "fallthrough"})) == found


def test_a_name_is_more_exact_than_a_family() -> None:
    for rules in ({"@fft": "promote", "fft_fft": "fp32"}, {"fft_fft": "fp32", "@fft": "promote"}):
        table = OpTable(rules)
        assert str(table.policy("fft_fft")) == "fp32"
        assert str(table.policy("fft_rfft")) == "promote"


def test_families_that_contradict_each_other() -> None:
    with pytest.raises(OpTableError, match="both name"):
        OpTable({"@buffer_writes": "promote", "@matmul_in_place": "banned"})


def test_no_such_family() -> None:
    with pytest.raises(UnknownOpError, match="did you mean '@buffer_writes'"):
        OpTable({"@bufer_writes": "promote"})


# -- Torch's operator database -------------------------------------------------------------------------


@pytest.mark.slow
def test_no_write_of_torchs_database_is_missing() -> None:
    """Every in-place variant that refuses lower-precision values for a float32 tensor is in the family."""
    pytest.importorskip("expecttest")  # torch's own tests need it
    from torch.testing._internal.common_methods_invocations import op_db

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused = {op.name for op in op_db if FULL in op.dtypes and op.inplace_variant and _refuses_lower(op)}
    assert refused == {name.partition("_.")[0].rstrip("_") for name in families()["buffer_writes"]} - {"addr"}


def _refuses_lower(op: Any) -> bool:
    for sample in itertools.islice(op.sample_inputs("cpu", FULL), 12):
        if _runs(op, sample, FULL) and not _runs(op, sample, BRAIN):
            return True
    return False


def _runs(op: Any, sample: Any, dtype: torch.dtype) -> bool:
    values = tree_map(lambda x: _in_dtype(x, dtype), (sample.args, sample.kwargs))
    try:
        op.inplace_variant(sample.input.clone(), *values[0], **values[1])
    except (RuntimeError, TypeError):
        return False
    return True


def _in_dtype(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype is FULL else value
