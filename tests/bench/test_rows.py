"""Ratios are of medians, to the base that was measured in turns with them; a loss is called one."""

from __future__ import annotations

import pytest

from mpamp.bench.rows import Row, with_ratios
from mpamp.bench.timing import Timing


def _row(variant: str, us: float | None) -> Row:
    time = None if us is None else Timing(us, us / 2, us * 2, us, rounds=1, repeats=1)
    return Row("micro", "work", variant, time=time)


@pytest.mark.parametrize(
    ("us", "verdict"), [(100, "level"), (103, "level"), (103.1, "slower"), (97, "level"), (96.9, "faster")]
)
def test_the_verdict_leaves_three_hundredths_to_noise(us: float, verdict: str) -> None:
    base, ours = with_ratios([_row("torch.autocast", 100), _row("mpamp persistent", us)], "torch.autocast")
    assert (base.ratio, base.verdict) == (1, None)
    assert (ours.ratio, ours.base, ours.verdict) == (round(us / 100, 4), "torch.autocast", verdict)


def test_without_the_base_there_is_no_ratio() -> None:
    rows = with_ratios([_row("torch.autocast", None), _row("mpamp", 100)], "torch.autocast")
    assert [(row.ratio, row.base, row.verdict) for row in rows] == [(None, None, None)] * 2


def test_what_has_no_time_has_no_ratio() -> None:
    rows = with_ratios([_row("torch.autocast", 100), _row("pure", None)], "torch.autocast")
    assert [row.ratio for row in rows] == [1, None]
