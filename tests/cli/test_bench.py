"""``mpamp bench``, run as a person would: what it writes, prints and answers. Its times are not tested."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import mpamp
from mpamp.bench import report
from mpamp.bench.rows import NOISE
from mpamp.cli.app import app
from tests import processes

ROOT = Path(__file__).parents[2]
ROW = {
    *("engine", "suite", "work", "variant", "mode", "status", "reason"),
    *("base", "time", "ratio", "verdict", "peak_bytes", "counts"),
}  # fmt: skip
TIME = {"us", "low_us", "high_us", "host_us", "rounds", "repeats"}
COUNTS = {"kernels", "casts", "weight_casts", "host_syncs", "cache_casts", "launches"}
ENVIRONMENT = {
    "mpamp", "torch", "python", "device", "card", "cards", "emulated", "toolkit", "machine", "processor", "threads",
    "date",
}  # fmt: skip


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the processes of the engines


def _bench(out: Path, *arguments: str) -> Result:
    command = ["bench", "--quick", "--device", "cpu", "--out", str(out), *arguments]
    return CliRunner().invoke(app, command, env={"COLUMNS": "160"})


def _json(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "bench.json").read_text(encoding="utf-8"))
    assert found.keys() == {
        "benchmark", "schema", "settings", "engines", "rows", "growth", "memory_over_regions",
    }  # fmt: skip
    return found


# -- What is measured ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    out = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        works = ("--work", "mlp-infer-2", "--work", "gpt2-infer-1x8")
        return _bench(out, "--suite", "infer", "--engine", "python", *works), out


@pytest.mark.slow
def test_it_writes_every_row(measured: tuple[Result, Path]) -> None:
    result, out = measured
    assert result.exit_code == 0, result.output
    found = _json(out)
    assert (found["benchmark"], found["schema"]) == ("mpamp bench", 1)
    assert found["settings"]["suites"] == ["infer"]
    assert found["engines"].keys() == {"python"}
    engine = found["engines"]["python"]
    assert (engine["status"], engine["reason"]) == ("ran", None)
    assert engine["environment"].keys() == ENVIRONMENT
    assert engine["environment"]["mpamp"] == mpamp.__version__
    assert [(row["work"], row["variant"]) for row in found["rows"]] == [
        (work, variant)
        for work in ("gpt2-infer-1x8", "mlp-infer-2")
        for variant in (
            *("float32", "pure", "torch.autocast", "mpamp", "mpamp persistent"),
            "torch.autocast over mpamp",
        )
    ]
    for row in found["rows"]:
        assert row.keys() == ROW
        assert row["time"].keys() == TIME
        assert row["counts"].keys() == COUNTS
        assert (row["engine"], row["mode"], row["status"]) == ("python", "eager", "ok")


@pytest.mark.slow
def test_ratios_and_verdicts_come_from_the_medians(measured: tuple[Result, Path]) -> None:
    rows = _json(measured[1])["rows"]
    bases = {row["work"]: row["time"]["us"] for row in rows if row["variant"] == "torch.autocast"}
    for row in rows:
        assert row["base"] == "torch.autocast"
        assert row["ratio"] == round(row["time"]["us"] / bases[row["work"]], 4)
        expected = "slower" if row["ratio"] > 1 + NOISE else "faster" if row["ratio"] < 1 - NOISE else "level"
        assert row["verdict"] == (expected if row["variant"].startswith("mpamp") else None)


@pytest.mark.slow
def test_it_prints_a_table_that_names_its_losses(measured: tuple[Result, Path]) -> None:
    result, out = measured
    rows = _json(out)["rows"]
    lines = result.stdout.splitlines()
    for variant in {row["variant"] for row in rows}:
        assert sum(f" {variant}  " in line for line in lines) >= 2
    slower = sum(row["verdict"] == "slower" for row in rows)
    assert sum(line.rstrip().endswith("slower") for line in lines) == slower
    assert (f"{slower} rows of mpamp's are slower" in result.stdout) is bool(slower)


@pytest.mark.slow
def test_it_draws_the_ratios(measured: tuple[Result, Path]) -> None:
    result, out = measured
    assert (out / "bench.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert str(out / "bench.png") in result.stdout
    assert not (out / "growth.png").exists()


@pytest.mark.slow
def test_a_median_is_one_of_its_rounds_or_between_two(measured: tuple[Result, Path]) -> None:
    for row in _json(measured[1])["rows"]:
        time = row["time"]
        assert time["rounds"] == 2
        assert time["us"] == pytest.approx(statistics.mean((time["low_us"], time["high_us"])), abs=0.001)


@pytest.mark.slow
def test_growth(tmp_path: Path) -> None:
    result = _bench(tmp_path, "--suite", "growth", "--engine", "python")
    assert result.exit_code == 0, result.output
    found = _json(tmp_path)
    subjects = {each["subject"] for each in found["growth"]}
    assert subjects == {"parameters", "regions in turn", "regions at once", "rules", "optimizers under one scaler"}
    assert all(subject in result.stdout for subject in subjects)
    assert found["memory_over_regions"]["python"]["is_equal"]
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert not (tmp_path / "bench.png").exists()


@pytest.mark.slow
def test_micro(tmp_path: Path) -> None:
    result = _bench(tmp_path, "--suite", "micro", "--engine", "python")
    assert result.exit_code == 0, result.output
    works = {row["work"].partition(":")[0] for row in _json(tmp_path)["rows"]}
    assert works >= {"region", "linear", "softmax.int", "scaler"}


@pytest.mark.slow
def test_what_there_is_no_time_for_is_said(tmp_path: Path) -> None:
    result = _bench(tmp_path, "--suite", "train", "--engine", "python", "--budget", "0")
    assert result.exit_code == 0, result.output
    rows = _json(tmp_path)["rows"]
    assert len(rows) >= 10
    assert {frozenset(row) for row in rows} == {frozenset(ROW)}
    assert {(row["status"], row["reason"], row["ratio"]) for row in rows} == {("skipped", "out of time", None)}
    assert result.stdout.count("out of time") == 1


@pytest.mark.slow
def test_two_cards_are_asked_for(tmp_path: Path) -> None:
    result = _bench(tmp_path, "--suite", "train", "--engine", "python", "--work", "ddp-train-4")
    assert result.exit_code == 0, result.output
    assert "Skipped: ddp-train-4, eager, all (python): needs 2 cpu devices; there is 1" in result.stdout


# -- What goes wrong -----------------------------------------------------------------------------------


def _results(monkeypatch: pytest.MonkeyPatch, *results: tuple[str, Any]) -> None:
    """Have every engine run, and give these results."""

    def measure_under(engine: str, settings: Any) -> Iterator[tuple[str, Any]]:
        yield from results

    monkeypatch.setattr(report, "why_not", lambda engine: None)
    monkeypatch.setattr(report, "measure_under", measure_under)


def _failed(variant: str) -> tuple[str, dict[str, Any]]:
    row = dict.fromkeys(ROW - {"engine"}, None)
    told = {"suite": "infer", "work": "mlp", "mode": "eager", "variant": variant}
    return "row", row | told | {"status": "failed", "reason": "RuntimeError: no"}


def test_a_failure_of_mpamp_is_a_problem_and_one_of_torch_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _results(monkeypatch, _failed("torch.autocast"))
    result = _bench(tmp_path, "--engine", "python")
    assert result.exit_code == 0
    assert "Failed: mlp, eager, torch.autocast (python): RuntimeError: no" in result.stdout
    _results(monkeypatch, _failed("mpamp persistent"))
    result = _bench(tmp_path, "--engine", "python")
    assert result.exit_code == 1
    assert "Problem: python: mlp, eager, mpamp persistent: RuntimeError: no" in result.stdout


def test_a_crash_is_a_problem_and_what_was_measured_before_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _results(monkeypatch, _failed("pure"), ("crash", "it ended with -11"))
    result = _bench(tmp_path, "--engine", "python")
    assert result.exit_code == 1
    assert "Problem: python: it ended with -11" in result.stdout
    found = _json(tmp_path)
    assert found["engines"]["python"]["status"] == "failed"
    assert [row["variant"] for row in found["rows"]] == ["pure"]


def test_an_engine_that_is_not_here_is_skipped_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _results(monkeypatch, _failed("pure"))
    monkeypatch.setattr(report, "why_not", {"python": None, "compiled": "not built"}.get)
    result = _bench(tmp_path)
    assert result.exit_code == 0
    assert "Engine compiled skipped: not built" in result.stdout
    found = _json(tmp_path)
    assert found["engines"]["compiled"] == {"status": "skipped", "reason": "not built", "environment": None}
    assert {row["engine"] for row in found["rows"]} == {"python"}


def test_where_no_engine_runs_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "why_not", lambda engine: "not built")
    result = _bench(tmp_path, "--engine", "compiled")
    assert result.exit_code == 1
    assert "no engine ran" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--suite", "everything"), ("everything", "micro", "infer", "train", "growth", "all")),
        (("--work", "gpt3"), ("gpt3", "gpt2-infer-1x8", "gan-train-2", "ddp-train-4")),
        (("--device", "warp"), ("warp",)),
        (("--mode", "lazy"), ("lazy", "eager", "compile", "freezing")),
        (("--variant", "float8"), ("float8", "mpamp persistent")),
        (("--engine", "rust"), ("rust", "python", "compiled")),
        (("--rounds", "0"), ("--rounds",)),
    ],
)
def test_a_wrong_option_is_answered_with_the_allowed_ones(
    arguments: tuple[str, ...], told: tuple[str, ...], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = _bench(out, *arguments)
    assert result.exit_code == 2
    assert [word for word in told if word not in result.stderr] == []
    assert not out.exists()


def test_without_matplotlib_there_are_no_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _results(monkeypatch, _failed("pure"))
    monkeypatch.delitem(sys.modules, "mpamp.bench.plot", raising=False)
    monkeypatch.delattr("mpamp.bench.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    result = _bench(tmp_path, "--engine", "python")
    assert result.exit_code == 0, result.output
    assert "pip install 'mpamp[bench]'" in result.stdout
    assert (tmp_path / "bench.json").exists()


# -- python -m mpamp -----------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--version"], ["bench", "--suite", "everything"]])
def test_python_m_is_the_command(arguments: list[str]) -> None:
    done = processes.python("-m", "mpamp", *arguments)
    by_runner = CliRunner().invoke(app, arguments)
    assert done.returncode == by_runner.exit_code
    assert done.stdout == by_runner.stdout
    assert done.stderr.replace("python -m mpamp", "mpamp") == by_runner.stderr
