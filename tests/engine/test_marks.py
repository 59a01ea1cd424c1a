"""The mark: which tables are in force, carried by torch's own autocast state."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mpamp
from mpamp.engine import marks
from mpamp.engine.marks import DEFAULT_MARK, NO_MARK
from mpamp.engine.resolving import mark_here
from tests.torches import needs_torchs_kernels

BF16, FP32 = torch.bfloat16, torch.float32
OPS = ["gelu", "silu", "relu", "tanh", "sigmoid", "elu", "selu", "celu", "erf", "exp", "log", "sin"]


@pytest.fixture(autouse=True)
def carriers_are_put_back() -> Iterator[None]:
    yield
    marks._retired.clear()
    marks._warned.clear()
    marks.CARRIERS.choose()
    marks.forget_compiled_code()


def on_a_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def product() -> torch.dtype:
    a = torch.ones(2, 2)
    return (a @ a).dtype


def carried() -> list[tuple[bool, torch.dtype]]:
    return [(torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in marks._CANDIDATES]


def rules(number: int) -> dict[str, str]:
    return {op: "fp32" for i, op in enumerate(OPS) if number >> i & 1}


@pytest.mark.parametrize("ops", [None, {"softmax": "fp32"}, {"relu": "fp32"}])
def test_a_region_leaves_the_carriers_as_they_were(ops: Any) -> None:
    before = carried()
    with mpamp.autocast("cpu", ops=ops):
        assert carried() != before
        assert mark_here() is not NO_MARK
    assert carried() == before
    assert mark_here() is NO_MARK


def test_a_mark_says_which_tables_are_in_force() -> None:
    with mpamp.autocast("cpu"):
        assert mark_here() is DEFAULT_MARK
        with mpamp.autocast("cpu", ops={"softmax": "fp32"}):
            outer = mark_here()
            table = outer.table("cpu")
            assert table is not None
            assert table.policy("softmax.int") is mpamp.CastPolicy.FP32
            assert outer.table("xpu") is None
            with mpamp.autocast("cpu"):
                assert mark_here() is DEFAULT_MARK, "nested regions don't inherit ops="
        assert mark_here() is DEFAULT_MARK


def test_regions_with_equal_rules_have_one_mark() -> None:
    def seen(ops: dict[str, str]) -> Any:
        with mpamp.autocast("cpu", ops=ops):
            return mark_here()

    assert seen({"softmax": "fp32", "relu": "fp32"}) is seen({"relu": "fp32", "softmax": "fp32"})
    assert seen({"softmax": "fp32"}) is not seen({"relu": "fp32"})


def test_a_mark_is_given_back_with_its_regions() -> None:
    """Changes of the rules under one table would use up all there are."""
    numbers = marks._eager
    gc.collect()
    alive = len(numbers.marks)
    outer = marks.compose_mark(NO_MARK, "cpu", mpamp.OpTable({"gelu": "fp32"}))
    for number in range(1, 200):
        marks.compose_mark(outer, "xpu", mpamp.OpTable(rules(number)))
    assert len(numbers.marks) - alive in (0, 1)  # one if nobody else's region has this table
    total = len(numbers.unused) + len(numbers.returned) + len(numbers.marks)
    assert total == numbers.size, "none is lost"


def test_more_tables_than_there_are_marks_can_come_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[int] = []
    numbers = marks._Numbers(marks._states(marks._DIGITS)[:5], lambda: resets.append(1))
    monkeypatch.setattr(marks, "_eager", numbers)
    for number in range(1, 23):
        mark = marks.compose_mark(NO_MARK, "cpu", mpamp.OpTable(rules(number)))
        assert numbers.marks[mark.state] is mark
        del mark
    assert len(resets) == 4, "code may have been compiled for what a state stood for before"


def test_too_many_tables_at_a_time_are_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "_eager", marks._Numbers(marks._states(marks._DIGITS)[:3], lambda: None))
    kept = [marks.compose_mark(NO_MARK, "cpu", mpamp.OpTable(rules(n))) for n in (1, 2, 3)]
    with pytest.raises(mpamp.RegionError, match="over 3 different op tables at a time"):
        marks.compose_mark(NO_MARK, "cpu", mpamp.OpTable(rules(4)))
    assert marks.compose_mark(NO_MARK, "cpu", mpamp.OpTable(rules(2))) is kept[1]


def test_marks_of_compiled_code_live_until_it_is_forgotten() -> None:
    mark = marks.compose_mark(NO_MARK, "cpu", mpamp.OpTable({"gelu": "fp32"}), is_compiled=True)
    state = mark.state
    del mark
    assert state in marks._compiled.marks
    marks.forget_compiled_code()
    gc.collect()
    assert state not in marks._compiled.marks


@pytest.mark.parametrize("name", ["ipu", "maia", "mtia"])
def test_no_mark_is_made_of_one_device_that_is_autocast_by_itself(name: str) -> None:
    """Or a plain torch.autocast("cpu") beside it would follow a table of mpamp's."""
    with torch.autocast(name, dtype=BF16):
        assert mark_here() is NO_MARK
        with torch.autocast("cpu", dtype=BF16):
            assert mark_here() is NO_MARK


@pytest.mark.parametrize("ops", [None, {"matmul": "fp32"}])
@pytest.mark.parametrize("name", ["ipu", "maia", "mtia"])
def test_a_device_in_use_carries_nothing(name: str, ops: Any) -> None:
    with torch.autocast(name, dtype=BF16):
        before = torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)
        with mpamp.autocast("cpu", BF16, ops=ops):
            if name == "ipu" or ops is not None:
                assert (torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) == before
            assert product() is (FP32 if ops else BF16)
        assert (torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) == before


def test_a_device_that_regions_are_asked_for_is_no_carrier() -> None:
    assert "mtia" in marks.CARRIERS.names
    marks.retire_carrier("mtia")
    assert "mtia" not in marks.CARRIERS.names
    assert len(marks.CARRIERS.names) == 3
    with mpamp.autocast("cpu", BF16, ops={"matmul": "fp32"}):
        assert not torch.is_autocast_enabled("mtia")
        assert product() is FP32


def test_it_is_said_where_no_carrier_is_left() -> None:
    for name in marks._CANDIDATES:
        marks.retire_carrier(name)
    assert marks.CARRIERS.names == ()
    with pytest.warns(mpamp.MpampWarning, match="no device type is left"), mpamp.autocast("cpu", BF16):
        assert product() is BF16
    assert product() is FP32
    with pytest.raises(mpamp.RegionError, match="ipu, maia, mtia, hpu, xla, mps are in use"):
        mpamp.autocast("cpu", BF16, ops={"erfinv": "fp32"})


def test_a_region_in_a_compiled_program_is_told_from_any_autocast_of_a_carrier() -> None:
    mark = marks.compose_mark(NO_MARK, "cpu", None, is_compiled=True)
    assert sum(dtype is not None for dtype in mark.state) > 1
    contexts = [torch.autocast(n, dtype=d, enabled=e) for n, d, e in marks.mark_contexts(mark)]
    for context in contexts:
        context.__enter__()
    try:
        assert mark_here() is mark
    finally:
        for context in reversed(contexts):
            context.__exit__(None, None, None)
    assert mark_here() is NO_MARK


def test_a_thread_of_autograds_has_the_mark_of_what_called_backward() -> None:
    """It gets it with torch's state; nothing of ours has run there before."""
    with mpamp.autocast("cpu", ops={"softmax": "fp32"}):
        first = mark_here()

    def inherited() -> list[Any]:
        for change, part, value in marks.changes_to(first):
            change(part, value)
        with mpamp.autocast("cpu", ops={"relu": "fp32"}):
            inner = mark_here()
        return [inner is not first, inner.table("cpu") is not None, mark_here() is first]

    assert on_a_thread(inherited) == [True, True, True]


def test_dynamo_is_not_imported_to_forget_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    marks.forget_compiled_code()
    assert "torch._dynamo" not in sys.modules


def test_a_device_that_carried_marks_may_have_rules_of_its_own() -> None:
    with FakeTensorMode():
        x = torch.empty(2, 2, device="mtia")
        with mpamp.autocast("mtia", BF16):
            assert torch.mm(x, x).dtype is BF16
        with mpamp.autocast("mtia", BF16, ops={"mm": "fp32"}):
            assert torch.mm(x, x).dtype is FP32
    assert "mtia" not in marks.CARRIERS.names
    assert not torch.is_autocast_enabled("mtia")


@needs_torchs_kernels
def test_plain_regions_of_a_device_that_carried_marks_are_as_before() -> None:
    with FakeTensorMode():
        x = torch.empty(2, 2, device="mtia")
        with mpamp.autocast("mtia", BF16, ops={"mm": "fp32"}):
            assert torch.mm(x, x).dtype is FP32
        with torch.autocast("mtia", BF16), mpamp.autocast("cpu", ops={"gelu": "fp32"}):
            assert torch.mm(x, x).dtype is BF16
