"""The probe of conv3d's weight gradient, and what the CPU's table and ``mpamp doctor`` make of what it finds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch._subclasses.fake_tensor import FakeTensorMode

import mpamp
from mpamp.backends import cpu
from mpamp.backends.cpu import CpuBackend
from mpamp.backends.cpu.probe import leaves_garbage, weight_gradient
from mpamp.cli.app import app

BRAIN, HALF = torch.bfloat16, torch.float16


class Conv:
    """A weight gradient that is right but for what a test leaves out, and counts its calls."""

    def __init__(self, unwritten: slice | None = None, first_wrong: int = 0, error: Exception | None = None) -> None:
        self.unwritten, self.first_wrong, self.error, self.calls = unwritten, first_wrong, error, 0

    def __call__(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.error is not None:
            raise self.error
        result = torch.empty_like(weight)
        right = weight_gradient(gradient.float(), x.float(), weight.float())
        if self.unwritten is None or self.calls <= self.first_wrong:
            return result.copy_(right)
        written = torch.ones(3, dtype=torch.bool)
        written[self.unwritten] = False
        result[:, :, written] = right[:, :, written].to(weight.dtype)
        return result


@pytest.mark.parametrize("dtype", [BRAIN, HALF])
def test_a_right_one(dtype: torch.dtype) -> None:
    conv = Conv()
    assert leaves_garbage(dtype, conv) is False
    assert conv.calls == 12


@pytest.mark.parametrize("dtype", [BRAIN, HALF])
@pytest.mark.parametrize("unwritten", [slice(0, 1), slice(1, 2), slice(2, 3), slice(0, 3)], ids=str)
def test_memory_that_is_not_written(dtype: torch.dtype, unwritten: slice) -> None:
    assert leaves_garbage(dtype, Conv(unwritten)) is True


@pytest.mark.parametrize("first_wrong", range(1, 12))
def test_one_call_of_all_is_enough(first_wrong: int) -> None:
    conv = Conv(slice(2, 3), first_wrong)
    assert leaves_garbage(BRAIN, conv) is True
    assert conv.calls == first_wrong + 1


def test_stale_memory_is_not_right_by_chance() -> None:
    """A call that writes nothing gets the memory of the last one, whose result was right."""

    class Stale(Conv):
        last: torch.Tensor | None = None

        def __call__(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            last = self.last if self.last is not None and self.last.shape == weight.shape else None
            self.last = super().__call__(gradient, x, weight)
            return self.last if last is None else last

    assert leaves_garbage(BRAIN, Stale()) is True


def test_one_that_fails() -> None:
    assert leaves_garbage(BRAIN, Conv(error=RuntimeError("could not create a primitive"))) is True


def test_it_is_alone() -> None:
    """No mode, region or transform of the caller's is seen by it, and no random number is drawn."""
    before = torch.get_rng_state()
    seen: list[tuple[Any, ...]] = []

    def conv(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append((type(x), torch.is_autocast_enabled("cpu"), torch._C._len_torch_dispatch_stack(), x.device.type))
        return weight_gradient(gradient.float(), x.float(), weight.float()).to(weight.dtype)

    def probed(x: torch.Tensor) -> torch.Tensor:
        assert leaves_garbage(BRAIN, conv) is False
        return x

    with FakeTensorMode(), torch.autocast("cpu", BRAIN), torch.device("meta"):
        probed(torch.ones(2))
    torch.func.vmap(probed)(torch.ones(2))
    assert set(seen) == {(torch.Tensor, False, 0, "cpu")}
    assert torch.equal(torch.get_rng_state(), before)


# -- What is made of it --------------------------------------------------------------------------------


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.dtype]]:
    """A processor with units for bfloat16 alone whose conv3d is broken; the dtypes that were probed."""
    probed: list[torch.dtype] = []

    def found(dtype: torch.dtype) -> bool:
        probed.append(dtype)
        return leaves_garbage(dtype, Conv(slice(2, 3)))

    mpamp.get_op_table("cpu")  # this process's, from what its processor really does
    monkeypatch.setattr(cpu, "_has_units", lambda dtype: dtype is BRAIN)
    monkeypatch.setattr(cpu, "leaves_garbage", found)
    cpu._breaks_conv3d.cache_clear()
    yield probed
    cpu._breaks_conv3d.cache_clear()


def test_the_table_of_a_broken_processor(broken: list[torch.dtype]) -> None:
    table = CpuBackend().op_table()
    for op in ("conv3d", "conv3d.padding"):
        assert (str(table.policy(op, BRAIN)), str(table.policy(op, HALF))) == ("fp32", "lower_precision_fp")
        assert table[op].source == "this processor"
    assert str(table.policy("conv2d", BRAIN)) == "lower_precision_fp"
    x, weight = torch.ones(1, 2, 2, 4, 4), torch.ones(2, 2, 3, 3, 3)
    with mpamp.autocast("cpu", BRAIN, ops=table):
        assert torch.nn.functional.conv3d(x, weight, padding=1).dtype is torch.float32
        assert torch.nn.functional.conv2d(x[:, :, 0], weight[:, :, 0]).dtype is BRAIN
    with mpamp.autocast("cpu", HALF, ops=table):
        assert torch.nn.functional.conv3d(x, weight, padding=1).dtype is HALF


def test_it_is_probed_once(broken: list[torch.dtype]) -> None:
    for _ in range(3):
        CpuBackend().op_table()
        CpuBackend().known_faults()
    assert broken == [BRAIN]


def test_the_doctor_says_so(broken: list[torch.dtype]) -> None:
    report = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    (faults,) = [d["faults"] for d in report["devices"] if d["type"] == "cpu"]
    assert [("conv3d" in fault, "torch.bfloat16" in fault, "float32" in fault) for fault in faults] == [(True,) * 3]
    assert "Fault of cpu: conv3d's weight gradient" in CliRunner().invoke(app, ["doctor"]).stdout


def test_without_units_nothing_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_has_units", lambda dtype: False)
    monkeypatch.setattr(cpu, "leaves_garbage", lambda dtype: pytest.fail("probed"))
    cpu._breaks_conv3d.cache_clear()
    try:
        assert str(CpuBackend().op_table().policy("conv3d", BRAIN)) == "lower_precision_fp"
        assert CpuBackend().known_faults() == []
    finally:
        cpu._breaks_conv3d.cache_clear()


def test_the_probe_runs_on_this_processor() -> None:
    """Whatever it finds here; a processor that is found broken has its conv3d in float32."""
    for dtype in (BRAIN, HALF):
        is_broken = cpu._has_units(dtype) and leaves_garbage(dtype)
        assert (str(mpamp.get_op_table("cpu").policy("conv3d", dtype)) == "fp32") is is_broken
