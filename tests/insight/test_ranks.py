"""Two processes over gloo: each traces what it does itself, as alone; the rank that overflows is the one to say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import TWO_RANKS, Reports

WORKER = Path(__file__).with_name("ranks_worker.py")
pytestmark = TWO_RANKS


def test_nothing_failed(reports: Reports) -> None:
    assert [report.get("error") for report in reports] == [None, None]


@pytest.mark.parametrize(("name", "prefix"), [("alone", ""), ("ddp", "module."), ("fsdp2", "")])
def test_each_rank_counts_its_own_and_a_clean_model_has_no_findings(name: str, prefix: str, reports: Reports) -> None:
    wanted = {"uses": [[f"{prefix}0", 2, 6, 0], [f"{prefix}2.0", 2, 4, 0]], "findings": []}
    assert [report[name] for report in reports] == [wanted, wanted]


def test_the_rank_that_overflows_says_so_and_both_skip(reports: Reports) -> None:
    found = [report["overflow"] for report in reports]
    assert [f["steps"] for f in found] == [3, 3]
    assert [f["overflows"] for f in found] == [[[2, None, 16.0]], [[2, "linear", 16.0]]]
    assert [f["scale"] for f in found] == [8.0, 8.0]
    why = "the inf or NaN is another rank's than 0, or of a step before that it was added to"
    assert [f["told"] for f in found] == [[f"the scaler skipped this step, but no op here overflowed: {why}"], []]
