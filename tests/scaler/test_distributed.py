"""Two processes over gloo: an inf in one rank's part makes every rank skip, and keeps their scales equal."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.ranks import TWO_RANKS, Reports

WORKER = Path(__file__).with_name("distributed_worker.py")
WRAPPERS = ("ddp", "fsdp1", "fsdp1, original parameters", "fsdp2")
ADAMS = ("plain", "foreach", "fused")
WAYS = ("step", "unscale", "clip")
GOOD = ("plain and sharded, good", "complex sharded", "ordinary ops, sharded")
BAD = (
    "plain and bad sharded",
    "bad plain and sharded",
    "replicated before bad sharded",
    "replicated before bad sharded, fused",
    "group, one rank without gradients",
    "group, one rank without gradients, fused",
    "group, bad on both",
    "group, bad on both, fused",
    "complex bad sharded",
    "ordinary ops, bad sharded",
)

pytestmark = TWO_RANKS


def test_nothing_failed(reports: Reports) -> None:
    assert [report.get("error") for report in reports] == [None, None]


@pytest.mark.parametrize(("wrapper", "adam", "way"), list(itertools.product(WRAPPERS, ADAMS, WAYS)))
def test_every_rank_skips_and_has_the_same_scale(reports: Reports, wrapper: str, adam: str, way: str) -> None:
    for report in reports:
        found = report[f"{wrapper}/{adam}/{way}"]
        assert found["skipped"] == [False, True, False]
        assert found["scales"] == [8.0, 4.0, 4.0]
        assert found["unchanged"][1]
        assert found["distance"] <= 1e-6, "not what training without a scaler and without the bad step gives"
    assert any(not report[f"{wrapper}/{adam}/{way}"]["unchanged"][0] for report in reports)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("zeroes", [None, True, False])
def test_gradients_that_come_after_unscaling(reports: Reports, wrapper: str, zeroes: bool | None) -> None:
    """FSDP adds gradients to others by itself: nobody can tell scaled and unscaled ones apart then."""
    hides = wrapper in ("fsdp2", "fsdp1, original parameters")
    expected = "refused" if hides and zeroes is not True else "equal"
    assert [report["late"][f"{wrapper}/{zeroes}"] for report in reports] == [expected] * 2


@pytest.mark.parametrize("name", GOOD)
def test_mixed_gradients_are_unscaled(reports: Reports, name: str) -> None:
    for report in reports:
        assert not report[name]["skipped"]
        assert report[name]["values"] == [2.0] * len(report[name]["values"])
        assert report[name]["scale"] == 8.0


@pytest.mark.parametrize("name", BAD)
def test_inf_on_one_rank_is_every_ranks(reports: Reports, name: str) -> None:
    for report in reports:
        assert report[name]["skipped"]
        assert set(report[name]["values"]) == {0.0}
        assert report[name]["scale"] == 4.0


def test_a_rank_names_its_own_bad_gradients_alone(reports: Reports) -> None:
    assert reports[0]["names"] == ""
    assert "'weight' of group 0" in reports[1]["names"]
