"""Two processes over gloo: an inf in one rank's part makes every rank skip, and keeps their scales equal."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

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

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed"),
]

Reports = list[dict[str, Any]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Run the two processes once, and return what each reports."""
    folder = tmp_path_factory.mktemp("ranks")
    paths = [str(WORKER.parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    files = [folder / f"rank{rank}.json" for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(folder / "store"), str(file)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, file in enumerate(files)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(file.exists() for file in files), "\n".join(outputs)
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


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
