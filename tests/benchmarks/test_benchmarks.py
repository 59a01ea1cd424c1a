"""The scripts run, and write what their readers look for; tests/bench and tests/cli/test_bench.py are mpamp bench's."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.paths import search_path

ROOT = Path(__file__).resolve().parents[2]


def _run(script: str, *options: str) -> str:
    environ = {**os.environ, "PYTHONPATH": search_path(ROOT)}
    done = processes.python(str(ROOT / "benchmarks" / script), "--quick", *options, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_breakdown(tmp_path: Path) -> None:
    path = tmp_path / "breakdown.json"
    _run("breakdown.py", "--json", str(path), "--work", "gpt2-infer-1x8")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert (found["work"], found["environment"]["device"]) == ("gpt2-infer-1x8", "cpu")
    assert found["variants"].keys() == {"pure", "torch.autocast", "mpamp", "mpamp persistent"}
    copies = {name: row["copies"]["aten::_to_copy"] for name, row in found["variants"].items()}
    assert copies["pure"] == 0
    assert copies["torch.autocast"] > copies["mpamp persistent"]


def test_an_unknown_workload_is_named() -> None:
    with pytest.raises(AssertionError, match=r"no workload is called 'gpt3'; there are: gpt2-infer-1x8, .*gan-train-2"):
        _run("breakdown.py", "--work", "gpt3")


@pytest.mark.slow
def test_gpu_all_reports_each_part(tmp_path: Path) -> None:
    out = tmp_path / "out"
    _run("gpu_all.py", "--device", "cpu", "--out", str(out), "--parts", "breakdown")
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["environment"]["packages"].keys() >= {"pytest", "torchvision", "rich"}
    assert report["parts"].keys() == {"breakdown"}
    assert report["parts"]["breakdown"]["is_complete"]
    assert {path.name for path in out.iterdir()} == {"report.json", "breakdown.json"}


def test_gpu_all_says_what_it_had_no_time_for(tmp_path: Path) -> None:
    out = tmp_path / "out"
    _run("gpu_all.py", "--device", "cpu", "--out", str(out), "--parts", "bench-micro", "tests", "--budget-s", "0")
    skipped = {"skipped": "out of time"}
    assert json.loads((out / "report.json").read_text(encoding="utf-8"))["parts"] == {
        "bench-micro": skipped,
        "tests": skipped,
    }
