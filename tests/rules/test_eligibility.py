"""Which overloads a rule may apply to, and what its name means."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._ops import OpOverload

from mpamp import OpTableError, UnknownOpError
from mpamp.rules.eligibility import find_overload, is_in_place, is_out_of_place, overload_name, resolve

aten = torch.ops.aten


@functools.cache
def _aten_ops() -> list[str]:
    names = {
        n.partition("::")[2].partition(".")[0] for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")
    }
    return sorted(n for n in names if hasattr(getattr(aten, n, None), "overloads"))


def _overloads(op: str) -> list[OpOverload]:
    packet = getattr(aten, op)
    return [getattr(packet, overload) for overload in packet.overloads()]


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    made = torch.library.Library("mpamp_test_eligibility", "DEF")
    made.define("scale(Tensor x, float by) -> Tensor")
    made.define("scale.int(Tensor x, int by) -> Tensor")
    made.define("scale.out(Tensor x, float by, *, Tensor(a!) out) -> Tensor(a!)")
    made.define("scale_(Tensor(a!) x, float by) -> Tensor(a!)")
    yield made
    made._destroy()


@pytest.mark.parametrize(
    ("op", "out_of_place", "in_place"),
    [
        (aten.mm.default, True, False),
        (aten.mm.out, False, False),
        (aten.cat.default, True, False),
        (aten.cat.out, False, False),
        (aten.softmax.int, True, False),
        (aten.pow.Scalar, True, False),
        (aten.index_put.default, True, False),
        (aten.add_.Tensor, False, True),
        (aten.addmm_.default, False, True),
        (aten.relu_.default, False, True),
        (aten.copy_.default, False, True),
        (aten._foreach_add_.Scalar, False, True),
        (aten.view_as_complex.default, True, False),
        (aten.ones.default, False, False),
        (aten._native_batch_norm_legit.default, False, False),
        (aten.max.dim_max, False, False),
    ],
    ids=str,
)
def test_kind_of_overload(op: OpOverload, out_of_place: bool, in_place: bool) -> None:
    assert is_out_of_place(op) is out_of_place
    assert is_in_place(op) is in_place


@given(st.sampled_from(_aten_ops()))
def test_no_overload_is_both(op: str) -> None:
    for overload in _overloads(op):
        assert not (is_out_of_place(overload) and is_in_place(overload))


@given(st.sampled_from(_aten_ops()))
def test_every_overload_is_found_by_its_name(op: str) -> None:
    for overload in _overloads(op):
        assert find_overload(overload_name(overload)) is overload


@pytest.mark.parametrize("name", ["aten::nosuch", "aten::mm.nosuch", "nolib::mm", "aten::softmax", "mm", "", "aten::"])
def test_what_is_not_there_is_not_found(name: str) -> None:
    assert find_overload(name) is None


@given(st.sampled_from(_aten_ops()))
def test_a_name_means_exactly_the_out_of_place_overloads(op: str) -> None:
    if op.endswith("_") and not op.startswith("__"):
        return  # names one in-place overload, below
    expected = sorted(overload_name(o) for o in _overloads(op) if is_out_of_place(o))
    if expected:
        assert sorted(resolve(op)) == sorted(resolve(f"aten::{op}")) == expected
    else:
        with pytest.raises(UnknownOpError, match="can be autocast"):
            resolve(op)


@given(st.sampled_from(_aten_ops()))
def test_an_exact_name_means_itself(op: str) -> None:
    for overload in _overloads(op):
        exact = f"{op}.{overload._schema.overload_name or 'default'}"
        if is_out_of_place(overload) or is_in_place(overload):
            assert resolve(exact) == [overload_name(overload)]
        else:
            with pytest.raises(UnknownOpError, match="can't be autocast"):
                resolve(exact)


@pytest.mark.parametrize(
    ("name", "overloads"),
    [
        ("relu", ["aten::relu"]),
        ("aten::relu", ["aten::relu"]),
        ("mm.default", ["aten::mm"]),
        ("softmax.int", ["aten::softmax.int"]),
        ("conv1d", ["aten::conv1d", "aten::conv1d.padding"]),
        ("relu_", ["aten::relu_"]),
        ("aten::add_.Tensor", ["aten::add_.Tensor"]),
        ("__and__", ["aten::__and__.Scalar", "aten::__and__.Tensor"]),
    ],
)
def test_resolve(name: str, overloads: list[str]) -> None:
    assert resolve(name) == overloads


def test_ops_of_other_libraries(library: torch.library.Library) -> None:
    assert resolve("mpamp_test_eligibility::scale") == [
        "mpamp_test_eligibility::scale",
        "mpamp_test_eligibility::scale.int",
    ]
    assert resolve("mpamp_test_eligibility::scale_") == ["mpamp_test_eligibility::scale_"]
    with pytest.raises(UnknownOpError, match="out= variant"):
        resolve("mpamp_test_eligibility::scale.out")


def test_nearest_op_of_another_library(library: torch.library.Library) -> None:
    with pytest.raises(UnknownOpError, match="did you mean 'scale'"):
        resolve("mpamp_test_eligibility::scael")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sofmax", "no operator aten::sofmax; did you mean 'softmax'"),
        ("cross_entropy", "did you mean 'cross_entropy_loss'"),
        ("zzzzzzzz", "no operator aten::zzzzzzzz. Write 'op' or 'namespace::op'"),
        ("nolib::mm", "no operator nolib::mm"),
        ("", "unknown op ''"),
        ("::mm", "unknown op '::mm'"),
        ("softmax.nit", "unknown overload in 'softmax.nit'; did you mean 'int'.*Overloads are: .*int, int_out"),
        ("softmax.default", "Overloads are: .*int, int_out"),
        ("add_", "Overloads are: Scalar, Tensor"),
        ("mm.out", "out= variant"),
        ("ones", "no overload of aten::ones can be autocast"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(UnknownOpError, match=message) as error:
        resolve(name)
    assert isinstance(error.value, OpTableError)
    assert isinstance(error.value, LookupError)
