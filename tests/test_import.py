"""What ``import mpamp`` costs and loads, each time in a fresh process; and that these checks can fail."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import processes

ROOT = Path(__file__).parents[1]
ALLOWED = {"torch", "pluggy", "packaging", "mpamp", "tomli"}
MOST_MODULES = 90
"""mpamp has some 40 that its public names need, and reads TOML by 4 of the standard library's."""

REPORT = """
import json, sys
import torch
before = set(sys.modules)
{prelude}
import mpamp
{epilogue}
new = sorted(set(sys.modules) - before)
contexts = [d for d in ("cuda", "xpu") if getattr(torch, d).is_initialized()]
tables = mpamp.oplists.load_table.cache_info().currsize
print(json.dumps(dict(new=new, contexts=contexts, tables=tables)))
"""


def import_mpamp(prelude: str = "", epilogue: str = "", path: Path | None = None) -> dict[str, Any]:
    """Import mpamp after torch in a fresh process; return what that loaded."""
    paths = os.pathsep.join(str(p) for p in (ROOT, path) if p is not None)
    program = REPORT.format(prelude=prelude, epilogue=epilogue)
    process = processes.python("-c", program, env={**os.environ, "PYTHONPATH": paths}, cwd=ROOT)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def foreign(report: dict[str, Any]) -> set[str]:
    """Return the top-level packages that were loaded and that mpamp may not load."""
    return {name.partition(".")[0] for name in report["new"]} - ALLOWED - set(sys.stdlib_module_names)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return import_mpamp()


def test_import_loads_only_torch_pluggy_and_packaging(report: dict[str, Any]) -> None:
    assert foreign(report) == set()


def test_the_check_of_loaded_packages_can_fail() -> None:
    assert "_pytest" in foreign(import_mpamp(prelude="import _pytest.config"))


def test_import_makes_no_device_context(report: dict[str, Any]) -> None:
    assert report["contexts"] == []


def test_import_loads_no_backend_and_no_command_line(report: dict[str, Any]) -> None:
    parts = (
        "mpamp.backends.cpu",
        "mpamp.backends.cuda",
        "mpamp.backends.xpu",
        "mpamp.cli",
        "mpamp.testing",
        "mpamp.bench",
    )
    assert [name for name in report["new"] if name.startswith(parts)] == []


def test_import_does_not_load_the_compiler(report: dict[str, Any]) -> None:
    assert [name for name in report["new"] if name.startswith(("torch._dynamo", "torch._inductor"))] == []


def test_import_loads_few_modules(report: dict[str, Any]) -> None:
    assert 20 < len(report["new"]) < MOST_MODULES


def test_the_check_of_their_number_can_fail() -> None:
    assert len(import_mpamp(prelude="import http.server, unittest.mock, mpamp.cli.app")["new"]) > MOST_MODULES


def test_import_reads_no_table(report: dict[str, Any]) -> None:
    assert report["tables"] == 0


def test_the_check_of_tables_can_fail() -> None:
    assert import_mpamp(epilogue="mpamp.get_op_table('cpu')")["tables"] > 0


FIRST_REGION = """
from pathlib import Path
calls, folder = 0, str(Path(mpamp.__file__).parent)
def count(frame, event, argument):
    global calls
    calls += event == "call" and frame.f_code.co_filename.startswith(folder)
{more}
sys.setprofile(count)
with mpamp.autocast("cpu"):
    torch.ones(2, 2) @ torch.ones(2, 2)
sys.setprofile(None)
print(json.dumps(dict(calls=calls, new=sorted(sys.modules.keys() - before))))
raise SystemExit
"""
MOST_CALLS = 24_000
"""The first region of a process makes some 20,000 of mpamp's functions: a table's rows are read, and kernels built."""
MOST_MODULES_IN_USE = 140


@pytest.fixture(scope="module")
def first_region() -> dict[str, Any]:
    return import_mpamp(epilogue=FIRST_REGION.format(more=""))


def test_the_first_region_makes_few_calls(first_region: dict[str, Any]) -> None:
    assert 1000 < first_region["calls"] < MOST_CALLS


def test_the_check_of_calls_can_fail() -> None:
    more = "sys.setprofile(count)\nfor name in mpamp.oplists.table_names('xpu'): mpamp.oplists.load_table(name, 'xpu')"
    assert import_mpamp(epilogue=FIRST_REGION.format(more=more))["calls"] > MOST_CALLS


def test_the_first_region_loads_few_modules(first_region: dict[str, Any]) -> None:
    assert len(first_region["new"]) < MOST_MODULES_IN_USE
    left_out = ("packaging", "torch._dynamo", "torch._inductor", "mpamp.cli", "mpamp.testing", "mpamp.bench")
    assert [name for name in first_region["new"] if name.startswith(left_out)] == []


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """Install a distribution with a plugin that leaves a mark when it is imported."""
    info = tmp_path / "mpamp_trap-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mpamp-trap\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mpamp]\ntrapped = mpamp_trap\n")
    (tmp_path / "mpamp_trap.py").write_text(
        "from mpamp.plugins.backend import Backend\n"
        "class Trap(Backend):\n    device_type = 'trapped'\n    autocast_key = 'AutocastPrivateUse1'\n"
        "def mpamp_backends():\n    return [Trap()]\n"
    )
    return tmp_path


def test_import_loads_no_plugin(trap: Path) -> None:
    assert "mpamp_trap" not in import_mpamp(path=trap)["new"]


def test_the_check_of_plugins_can_fail(trap: Path) -> None:
    asking = "from mpamp.plugins.manager import manager\nmanager().backend('trapped')"
    assert "mpamp_trap" in import_mpamp(path=trap, epilogue=asking)["new"]
