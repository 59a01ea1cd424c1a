"""Every benchmark runs, and writes what its readers look for. Their times are not tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _run(script: str, *options: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--quick", *options]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _results(script: str, path: Path, *options: str) -> dict[str, Any]:
    _run(script, "--json", str(path), *options)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert found["environment"].keys() == {"torch", "python", "mpamp", "device", "card", "threads", "date"}
    assert found["environment"]["device"] == found["settings"]["device"] == "cpu"
    return found


TIMES = {"us", "low_us", "high_us", "host_us", "rounds", "repeats"}
COUNTS = {"kernels", "casts", "weight_casts", "host_syncs"}


def test_region(tmp_path: Path) -> None:
    found = _results("region.py", tmp_path / "region.json")
    plain = found["rows"][0]
    assert plain["case"] == "plain"
    assert plain["torch"].keys() == plain["mpamp"].keys() == TIMES
    assert found["ratio"] == plain["ratio"] > 0
    cases = {row["case"]: row for row in found["rows"]}
    assert {"disabled", "nested in one of the same dtype", "ops={...}"} <= cases.keys()
    assert cases["ops={...}"]["torch"] is cases["ops={...}"]["ratio"] is None


def test_ops(tmp_path: Path) -> None:
    found = _results("ops.py", tmp_path / "ops.json")
    rows = {(row["op"], row["situation"]): row for row in found["rows"]}
    assert {op for op, _ in rows} >= {"aten::mm", "aten::linear", "aten::softmax.int", "aten::cat", "aten::fft_fft"}
    frozen = rows["aten::linear", "frozen weight + bias, no_grad"]
    assert frozen["policy"] == {"torch": "lower_precision_fp", "mpamp": "lower_precision_fp"}
    assert frozen["times"].keys() == {"plain", "torch", "mpamp", "torch_over_mpamp"}
    assert all(timing.keys() == TIMES for timing in frozen["times"].values())
    # What torch casts at each use, mpamp keeps; the counters must tell them apart.
    assert frozen["counts"]["torch"].keys() == COUNTS
    assert frozen["counts"]["torch"]["weight_casts"] == 2
    assert frozen["counts"]["mpamp"]["weight_casts"] == 0


@pytest.mark.parametrize("options", [(), ("--dtype", "fp16", "--accumulate", "2", "--tasks", "gpt2-train-1x8")])
def test_models(tmp_path: Path, options: tuple[str, ...]) -> None:
    found = _results("models.py", tmp_path / "models.json", *options)
    tasks = {row["task"]: row for row in found["rows"]}
    passes = 2 if options else 1
    assert tasks.keys() == ({"gpt2-train-1x8"} if options else _quick_tasks())
    for row in tasks.values():
        variants = row["variants"]
        assert variants.keys() == row["ratio"].keys()
        assert set(variants) == {"float32", "pure", "torch.autocast", "mpamp", "mpamp persistent"}
        assert all(v["time"].keys() == TIMES and v["counts"].keys() == COUNTS for v in variants.values())
        casts = {name: v["counts"]["weight_casts"] for name, v in variants.items()}
        assert casts["float32"] == casts["pure"] == 0
        assert casts["torch.autocast"] == casts["mpamp"] > 0
        # Kept over the regions of one training step, and for good where nothing trains.
        is_training = "train" in row["task"]
        assert casts["mpamp persistent"] * passes == (casts["mpamp"] if is_training else 0)


def _quick_tasks() -> set[str]:
    return {"gpt2-infer-1x8", "gpt2-train-1x8", "resnet50-infer-1", "resnet50-train-1"}


def test_an_unknown_task_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"no task is called gpt3; there are: gpt2-infer-1x8, .*resnet50-train-1"):
        _run("models.py", "--tasks", "gpt3")


def test_breakdown(tmp_path: Path) -> None:
    found = _results("breakdown.py", tmp_path / "breakdown.json")
    assert found["variants"].keys() == {"pure", "torch.autocast", "mpamp", "mpamp persistent"}
    copies = {name: row["copies"]["aten::_to_copy"] for name, row in found["variants"].items()}
    assert copies["pure"] == 0
    assert copies["torch.autocast"] > copies["mpamp persistent"]


def test_gpu_all_reports_each_part(tmp_path: Path) -> None:
    out = tmp_path / "out"
    _run("gpu_all.py", "--device", "cpu", "--out", str(out), "--parts", "region")
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["environment"]["packages"].keys() >= {"pytest", "torchvision", "rich"}
    assert report["parts"].keys() == {"region"}
    assert report["parts"]["region"]["is_complete"]
    assert {path.name for path in out.iterdir()} == {"report.json", "region.json"}


def test_gpu_all_says_what_it_had_no_time_for(tmp_path: Path) -> None:
    out = tmp_path / "out"
    _run("gpu_all.py", "--device", "cpu", "--out", str(out), "--parts", "region", "ops", "--budget-s", "0")
    skipped = {"skipped": "out of time"}
    assert json.loads((out / "report.json").read_text(encoding="utf-8"))["parts"] == {"region": skipped, "ops": skipped}
