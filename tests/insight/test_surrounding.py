"""Tools see the region that they are called in: mpamp's, torch's, or one that is off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpamp
from mpamp.insight.surrounding import is_in_region

HALF, BRAIN = torch.float16, torch.bfloat16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(self.norm(self.linear(x)).float()).abs().sum()


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize("cache", [True, False])
def test_a_region_of_torchs_is_seen_as_it_is(dtype: torch.dtype, cache: bool) -> None:
    model, x = Net(), torch.randn(8, 64)
    with torch.autocast("cpu", dtype, cache_enabled=cache):
        seen = mpamp.explain(model, x)
        made = model.linear(x).dtype
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is dtype
    assert {use.dtypes_out[0] for use in seen.uses if use.op == "aten::linear"} == {str(made).removeprefix("torch.")}
    assert {use.region for use in seen.uses} == {str(dtype).removeprefix("torch.")}
    table = mpamp.OpTable.named("native", "cpu")
    assert {use.op for use in seen.uses if use.rule} <= set(table)
    assert seen.casts > 0
    assert not is_in_region()


@pytest.mark.parametrize("region", [torch.autocast, mpamp.autocast])
def test_in_a_region_that_is_off_calls_are_listed_as_they_run(region: Any) -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Softmax(1)), torch.randn(8, 64)
    with region("cpu", dtype=BRAIN, enabled=False):
        seen = mpamp.explain(model, x)
    assert [(use.op, use.module, use.calls, use.casts, use.dtypes_out[0]) for use in seen.uses] == [
        ("aten::linear", "0", 1, 0, "float32"),
        ("aten::softmax.int", "1", 1, 0, "float32"),
    ]
    assert (seen.casts, seen.findings) == (0, ())


def test_a_region_of_torchs_in_one_of_mpamps_counts() -> None:
    layer, x = nn.Linear(64, 64), torch.randn(8, 64)
    with mpamp.autocast("cpu", BRAIN), torch.autocast("cpu", HALF):
        assert mpamp.explain(layer, x).uses[0].dtypes_out == ("float16",)
    with mpamp.autocast("cpu", BRAIN), torch.autocast("cpu", enabled=False):
        assert mpamp.explain(layer, x).casts == 0


def test_without_a_region_a_default_one_is_opened() -> None:
    assert mpamp.explain(nn.Linear(64, 64), torch.randn(8, 64)).uses[0].dtypes_out == ("bfloat16",)


def test_find_overflow_runs_in_the_region_around() -> None:
    layer, x = nn.Linear(64, 64), torch.full((4, 64), 3e38)
    with torch.autocast("cpu", BRAIN, enabled=False):
        first = mpamp.find_overflow(layer, x).first
    assert first is not None
    assert first.overflow is not None
    assert first.overflow.outputs[0].dtype is torch.float32
    with torch.autocast("cpu", HALF):
        first = mpamp.find_overflow(layer, x).first
    assert first is not None
    assert first.overflow is not None
    assert first.overflow.outputs[0].dtype is HALF


@pytest.mark.parametrize("region", [torch.autocast, mpamp.autocast])
def test_the_depth_of_regions_is_left(region: Any) -> None:
    assert not is_in_region()
    with region("cpu", dtype=BRAIN):
        assert is_in_region()
        assert is_in_region()
        with region("cpu", enabled=False):
            assert is_in_region()
        assert is_in_region()
    assert not is_in_region()
