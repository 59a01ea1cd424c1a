"""The probe of conv3d's weight gradient, and what the CPU's table and ``mpamp doctor`` make of what it finds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import mpamp
from mpamp import OpTable
from mpamp.backends import cpu
from mpamp.backends.cpu import CpuBackend
from mpamp.backends.cpu.probe import KERNELS, fails, leaves_garbage, weight_gradient
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


# -- Kernels that are missing --------------------------------------------------------------------------


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A processor that oneDNN says it serves in both dtypes; what its kernels do is put into the result, by rule."""
    steps: dict[str, Any] = dict.fromkeys(KERNELS, (lambda dtype: None,))
    mpamp.get_op_table("cpu")  # this process's, from what its processor really does
    monkeypatch.setattr(cpu, "_onednn_runs", lambda dtype: True)
    monkeypatch.setattr(cpu, "_breaks_conv3d", lambda dtype: False)
    monkeypatch.setattr(cpu, "KERNELS", steps)
    cpu._fails.cache_clear()
    yield steps
    cpu._fails.cache_clear()


def _raise_in(wanted: torch.dtype, *, in_training: bool = False) -> Any:
    def run(dtype: torch.dtype) -> None:
        if dtype is wanted and torch.is_grad_enabled() is in_training:
            raise RuntimeError("could not create a primitive descriptor for the LSTM forward propagation primitive")

    def step(dtype: torch.dtype) -> None:
        run(dtype)
        with torch.enable_grad():
            run(dtype)

    return step


@pytest.mark.parametrize("in_training", [False, True])
def test_a_missing_lstm_runs_in_float32(lacking: dict[str, Any], in_training: bool) -> None:
    """In training and inference both, though one of them alone may be missing: one op has one row."""
    lacking["mkldnn_rnn_layer"] = (_raise_in(HALF, in_training=in_training),)
    table = CpuBackend().op_table()
    found = [str(table.policy("mkldnn_rnn_layer", dtype)) for dtype in (HALF, BRAIN)]
    assert found == ["fp32", "lower_precision_fp"]
    assert table["mkldnn_rnn_layer"].source == "this processor"
    layer, x = torch.nn.LSTM(4, 4), torch.ones(3, 2, 4, requires_grad=True)
    with mpamp.autocast("cpu", HALF, ops=table):
        y = layer(x)[0]
    assert y.dtype is torch.float32
    y.sum().backward()


@pytest.mark.parametrize("rule", [name for name in KERNELS if name != "mkldnn_rnn_layer"])
def test_every_other_missing_kernel_too(lacking: dict[str, Any], rule: str) -> None:
    lacking[rule] = (_raise_in(BRAIN),)
    table = CpuBackend().op_table()
    for op in OpTable({rule: "fp32"}):
        assert [str(table.policy(op, dtype)) for dtype in (BRAIN, HALF)] == ["fp32", "lower_precision_fp"], op


def test_a_processor_that_lacks_nothing(lacking: dict[str, Any]) -> None:
    assert CpuBackend().op_table() == OpTable.named("default", "cpu")


@pytest.mark.parametrize("rule", KERNELS)
def test_the_steps_run_what_they_name(rule: str) -> None:
    """In float32, which every processor has; one that raises is one that fails."""
    assert fails(KERNELS[rule], torch.float32) is False
    assert fails((*KERNELS[rule], _raise_in(HALF)), HALF) is True


def test_both_directions_of_an_lstm_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "mkldnn_rnn" in str(func):
                seen.append(f"{func._schema.name} {args[-1] is True and torch.is_grad_enabled()}")
            return func(*args, **(kwargs or {}))

    with Seen():
        KERNELS["mkldnn_rnn_layer"][0](torch.float32)
    name = "aten::mkldnn_rnn_layer"
    assert seen == [f"{name} False", f"{name} True", f"{name}_backward False"]
