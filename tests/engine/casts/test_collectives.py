"""Collectives of two ranks, on gloo, that write into a weight or into what shares its memory end its kept cast."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import TWO_RANKS, Reports, reports_of_two

pytestmark = TWO_RANKS


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    return reports_of_two(Path(__file__).with_name("collectives_worker.py"), tmp_path_factory.mktemp("ranks"))


def wrong(reports: Reports, kind: str) -> dict[str, object]:
    """Return what isn't as it should be, of one kind of cases, by rank and case."""
    found = {f"rank {rank}: {case}": said for rank, each in enumerate(reports) for case, said in each[kind].items()}
    assert len(found) > 1
    return {case: said for case, said in found.items() if said is not True}


def test_a_collective_s_write_is_seen(reports: Reports) -> None:
    assert wrong(reports, "writes") == {}


def test_a_use_before_a_collective_s_end_leaves_nothing_stale(reports: Reports) -> None:
    assert wrong(reports, "later") == {}


def test_once_it_has_ended_a_weight_is_cast_once_and_no_memory_is_held(reports: Reports) -> None:
    assert wrong(reports, "after") == {}


def test_what_wrappers_and_optimizers_send_is_seen(reports: Reports) -> None:
    assert wrong(reports, "wrappers") == {}
