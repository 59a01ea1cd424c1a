"""An engine that mpamp doctor doesn't name is not measured, and a process that dies is told of."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from mpamp.bench import engines
from mpamp.bench.engines import measure_under, why_not
from mpamp.bench.worker import Settings


def _doctor_says(monkeypatch: pytest.MonkeyPatch, stdout: str, stderr: str = "") -> dict[str, Any]:
    asked: dict[str, Any] = {}

    def run(command: list[str], env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.update(command=command, engine=env["MPAMP_ENGINE"])
        return subprocess.CompletedProcess(command, 0, stdout, stderr)

    monkeypatch.setattr(engines.subprocess, "run", run)
    return asked


def test_an_engine_that_the_doctor_names_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _doctor_says(monkeypatch, json.dumps({"engine": {"name": "compiled"}}))
    assert why_not("compiled") is None
    assert asked["engine"] == "compiled"
    assert asked["command"][1:] == ["-m", "mpamp", "doctor", "--json"]


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"name": "python"}, "MPAMP_ENGINE=compiled gives the engine python"),
        ({"name": "python", "why": "no compiler"}, "MPAMP_ENGINE=compiled gives the engine python: no compiler"),
        (None, "MPAMP_ENGINE=compiled gives the engine None"),
    ],
)
def test_one_that_it_does_not_name_is_left_out_with_the_reason(
    engine: dict[str, str] | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _doctor_says(monkeypatch, json.dumps({"engine": engine}))
    assert why_not("compiled") == reason


def test_a_doctor_that_fails_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    _doctor_says(monkeypatch, "", "Traceback\nmpamp.errors.MpampError: no such engine\n")
    assert why_not("compiled") == "mpamp doctor failed: mpamp.errors.MpampError: no such engine"


def test_the_python_engine_is_here() -> None:
    assert why_not("python") is None


def test_a_process_that_dies_is_told_of(capfd: pytest.CaptureFixture[str]) -> None:
    found = list(measure_under("python", Settings(("infer",), "nonsense")))
    assert found == [("crash", "the process of the engine python ended with 1")]
    assert "nonsense" in capfd.readouterr().err
