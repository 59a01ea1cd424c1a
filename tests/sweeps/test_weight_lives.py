"""Random programs of weights' lives never use a stale cast, and never hang (``weight_lives``)."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.paths import search_path

from . import weight_lives, weight_writes

ROOT = Path(__file__).parents[2]
PROGRAMS, BLOCK = 2000, 100

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="programs fork")


def run(first: int, count: int) -> dict[str, Any]:
    """Run programs in a process of their own, which ends if one of them hangs, and return what it reports."""
    command = [sys.executable, "-m", "tests.sweeps.weight_lives", str(first), str(count)]
    environment = {**os.environ, "PYTHONPATH": search_path(ROOT), "MPAMP_CHECK_LOCKS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report["failed"] == {}, done.stderr[-6000:]
    return report


def test_some_lives() -> None:
    assert run(0, 60)["programs"] == 60


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(0, PROGRAMS, BLOCK))
def test_many_lives(first: int) -> None:
    assert run(first, BLOCK)["programs"] == BLOCK


def test_a_life_is_told_by_its_seed() -> None:
    assert weight_lives.outline(3) == weight_lives.outline(3)
    assert weight_lives.outline(3) != weight_lives.outline(4)


def test_a_write_that_nothing_shows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the programs would find one that mpamp misses."""

    def write(weight: Any, values: Any) -> None:
        values = values.contiguous()
        ctypes.memmove(weight.data_ptr(), values.data_ptr(), values.nbytes)

    monkeypatch.setattr(weight_writes, "COUNTED", {"by its address": write})
    names = ["use all", "a counted write", "a counted write", "use all"]
    assert any("by hand" in weight_lives.failure(seed, names) for seed in range(4))
