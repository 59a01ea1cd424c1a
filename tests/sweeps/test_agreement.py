"""The two engines and casts made by hand agree, over random calls: in dtypes, values, gradients and errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mpamp.engine.compiled import store
from tests.sweeps import agreement_calls as calls

ENGINES = ("python", "compiled")


def _results(tmp_path: Path, first: int, count: int) -> dict[str, dict[str, list[object]]]:
    """Run seeds in a process of each engine that there is; by engine, what each seed gave in a region and by hand."""
    engines = ENGINES if store.load() is not None else ENGINES[:1]
    running = {}
    for engine in engines:
        command = [sys.executable, "-W", "ignore", "-m", calls.__name__, str(first), str(count), str(tmp_path / engine)]
        environment = {**os.environ, "MPAMP_ENGINE": engine, "OMP_NUM_THREADS": "1"}
        running[engine] = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    found = {}
    for engine, process in running.items():
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors[-2000:]
        report = json.loads((tmp_path / engine).read_text())
        assert report["engine"] == engine
        found[engine] = report["results"]
    return found


def _check(tmp_path: Path, first: int, count: int) -> None:
    found = _results(tmp_path, first, count)
    specified = found["python"]
    assert len(specified) == count
    by_hand = {seed: (got, want) for seed, (got, want) in specified.items() if want is not None}
    assert len(by_hand) > count / 4
    wrong = {f"seed {seed}": pair for seed, pair in by_hand.items() if pair[0] != pair[1]}
    assert not wrong, "what the engine gives, and casts made by hand"
    if "compiled" in found:
        compiled = found["compiled"]
        apart = {
            f"seed {seed}": (got[0], compiled[seed][0])
            for seed, got in specified.items()
            if got[0] != compiled[seed][0]
        }
        assert not apart, "what the engine in Python gives, and the compiled one"


def test_a_slice(tmp_path: Path) -> None:
    _check(tmp_path, 0, 500)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(int(os.environ.get("MPAMP_AGREEMENT_PARTS", "20"))))
def test_all(tmp_path: Path, part: int) -> None:
    """About three minutes a part on a core for each engine: 20 of them take an hour."""
    _check(tmp_path, 1_000_000 + part * 8000, 8000)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_the_calls_are_of_every_kind() -> None:
    made = [calls.program(seed) for seed in range(1500)]
    assert {m.name for m in made} == set(calls.CALLS)
    assert {m.mode for m in made} == set(calls.MODES)
    assert {m.nesting for m in made} == {"", "in float32", "in torch's"}
    tensors = [
        t for m in made for a in m.args for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)
    ]
    floating = {d for d in calls.DTYPES if d.is_floating_point or d.is_complex}
    assert floating | {torch.int64, torch.bool, torch.quint8} <= {t.dtype for t in tensors}
    assert any(t.is_inference() for t in tensors)
    assert any(t.layout is not torch.strided for t in tensors)
    assert {m.ops is None for m in made} == {m.enabled for m in made} == {True, False}


def _shown(value: object) -> object:
    """Return what a value shows: torch prints no numbers of some dtypes."""
    if isinstance(value, torch.Tensor) and value.dtype not in (torch.float32, torch.bfloat16):
        return value.dtype, value.shape, value.requires_grad
    return repr(value)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_a_seed_is_the_same_program_in_every_process() -> None:
    for seed in range(40):
        first, second = calls.program(seed), calls.program(seed)
        assert (first.name, first.lower, first.ops, first.mode) == (second.name, second.lower, second.ops, second.mode)
        shown = [[_shown(a) for a in p.args] for p in (first, second)]
        assert shown[0] == shown[1]
