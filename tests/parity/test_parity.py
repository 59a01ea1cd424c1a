"""Every row of torch's native tables gives the same dtypes in a region as under torch's own autocast."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mpamp
from tests.parity.differences import DIFFERENCES, Difference
from tests.parity.observe import PLACES, Observation, device_of, is_here, rows

ROOT = Path(__file__).parents[2]
Observed = dict[str, dict[str, dict[str, dict[str, Observation]]]]
"""Regime -> place -> overload -> form -> observation."""


def _native(place: str) -> dict[str, str]:
    """Return the policy of every row of torch's native table that this torch has."""
    table = mpamp.OpTable.named("native", device_of(place))
    return {op: str(table.policy(op)) for op in rows(place) if op in table}


NATIVE = {place: _native(place) for place in PLACES if is_here(place)}
MARKS = {place: [pytest.mark.accelerator] for place in PLACES if place == device_of(place) != "cpu"}
ROWS = [
    pytest.param(place, op, id=f"{place}: {op}", marks=MARKS.get(place, []))
    for place, native in NATIVE.items()
    for op in native
]
ROWS += [
    pytest.param(place, "", marks=pytest.mark.skip(reason=f"no {place} tensors on this machine"))
    for place in PLACES
    if place not in NATIVE
]


@pytest.fixture(scope="session")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    """What torch and mpamp do, each seen in a fresh process; the workers of one session share it."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    file = shared / "observed.json"
    with open(shared / "observed.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            file.write_text(_observe())
    found: Observed = json.loads(file.read_text())
    return found


def _observe() -> str:
    command = [sys.executable, "-m", "tests.parity.observe"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p or "." for p in [str(ROOT), *sys.path])}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def _seen(observation: Observation) -> tuple[Any, ...]:
    return observation["ops"], observation["out"]


def _difference(place: str, op: str, form: str) -> Difference | None:
    """Return the difference by design that covers one call, if there is one."""
    dtype, _, name = form.partition(": ")
    policy = NATIVE[place][op]
    found = [d for d in DIFFERENCES if d.covers(op, policy, device_of(place), getattr(torch, dtype), name)]
    assert len(found) <= 1
    return found[0] if found else None


def _expected(observed: Observed, place: str, op: str, form: str) -> Observation:
    difference = _difference(place, op, form)
    if difference is None:
        return observed["torch"][place][op][form]
    dtype = form.partition(":")[0]
    alone = {"as called": form, "in float32": f"{dtype}: float32", "in the region's dtype": f"{dtype}: lower"}
    return observed["none"][place][op][alone[difference.becomes]]


def _differing(observed: Observed, place: str, op: str) -> list[str]:
    torchs, ours = observed["torch"][place][op], observed["mpamp"][place][op]
    return [form for form in torchs if _seen(torchs[form]) != _seen(ours[form])]


@pytest.mark.parametrize(("place", "op"), ROWS)
def test_row(place: str, op: str, observed: Observed, record_property: Callable[[str, object], None]) -> None:
    ours = observed["mpamp"][place][op]
    record_property("parity", (place, len(ours), bool(_differing(observed, place, op))))
    expected = {form: _expected(observed, place, op, form) for form in ours}
    wrong = {form: (expected[form], ours[form]) for form in ours if _seen(ours[form]) != _seen(expected[form])}
    assert not wrong, f"{op} on {place}: expected, then mpamp\n{json.dumps(wrong, indent=1)}"


@pytest.mark.parametrize(("place", "op"), ROWS)
def test_torch_outside_a_region_is_torch(place: str, op: str, observed: Observed) -> None:
    """With every kernel of ours installed, torch.autocast does what it did before mpamp was imported."""
    before, after = observed["torch"][place][op], observed["torch, outside"][place][op]
    if not hasattr(torch.library, "get_kernel"):  # ours can't call torch's own then, and does as it does by design
        before = {form: o for form, o in before.items() if _difference(place, op, form) is None}
    assert {f: _seen(o) for f, o in before.items()} == {f: _seen(after[f]) for f in before}


@pytest.mark.parametrize(("place", "op"), ROWS)
def test_row_is_seen(place: str, op: str, observed: Observed) -> None:
    """The arguments reach the op: it runs, or something below autocast is seen to get float tensors."""
    seen = observed["mpamp"][place][op]["bfloat16: float32"], observed["none"][place][op]["bfloat16: float32"]
    for observation in seen:
        assert any("float" in called or "complex" in called for called in observation["ops"])
        assert place != "cpu" or observation["out"] != "raises"


@pytest.mark.parametrize("place", NATIVE)
def test_no_row_is_missing(place: str, observed: Observed) -> None:
    later = "aten::linalg_matrix_sqrth"  # from torch 2.14 on; the default table has it
    assert [op for op in observed["torch"][place] if op != later] == list(NATIVE[place])


def test_over_350_rows() -> None:
    assert sum(map(len, NATIVE.values())) > 350


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda d: f"{d.rows} on {', '.join(d.devices)}, {d.forms[0]}")
def test_difference_is_real(difference: Difference, observed: Observed) -> None:
    """A difference that torch no longer has must leave the list."""
    names = {
        (device_of(p), name)
        for p, native in NATIVE.items()
        for op, policy in native.items()
        for name in (policy, op.removeprefix("aten::"))
    }
    devices = {device for device in difference.devices if (device, difference.rows) in names}
    if not difference.lower or not devices:
        pytest.skip(
            "this processor has units for every lower precision" if devices else "no such row can be called here"
        )
    calls = [(p, op, f) for p, native in NATIVE.items() for op in native for f in _differing(observed, p, op)]
    covered = {device_of(p) for p, op, f in calls if _difference(p, op, f) is difference}
    assert covered == devices


def test_differences_are_documented() -> None:
    page = (ROOT / "docs" / "differences.md").read_text(encoding="utf-8")
    for difference in DIFFERENCES:
        assert difference.as_markdown() in page
