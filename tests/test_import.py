"""What ``import mpamp`` costs and loads, each time in a fresh process; and that these checks can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = {"torch", "pluggy", "packaging", "mpamp", "tomli"}
LIMIT_MS = 50

REPORT = """
import json, sys, time
import torch
before = set(sys.modules)
{prelude}
start = time.process_time()
import mpamp
ms = (time.process_time() - start) * 1e3
{epilogue}
new = sorted(set(sys.modules) - before)
contexts = [d for d in ("cuda", "xpu") if getattr(torch, d).is_initialized()]
print(json.dumps(dict(ms=ms, new=new, contexts=contexts)))
"""


def import_mpamp(prelude: str = "", epilogue: str = "", path: Path | None = None) -> dict[str, Any]:
    """Import mpamp after torch in a fresh process; return what that loaded and its processor time, in ms."""
    paths = os.pathsep.join(str(p) for p in (ROOT, path) if p is not None)
    process = subprocess.run(
        [sys.executable, "-c", REPORT.format(prelude=prelude, epilogue=epilogue)],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def foreign(report: dict[str, Any]) -> set[str]:
    """Return the top-level packages that were loaded and that mpamp may not load."""
    return {name.partition(".")[0] for name in report["new"]} - ALLOWED - set(sys.stdlib_module_names)


def best_ms(prelude: str = "") -> float:
    """Return the shortest of a few imports, in ms; stop early once one is quick enough."""
    times = []
    for _ in range(8):
        times.append(import_mpamp(prelude)["ms"])
        if min(times) < LIMIT_MS:
            break
    return float(min(times))


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
    parts = ("mpamp.backends.cpu", "mpamp.backends.cuda", "mpamp.backends.xpu", "mpamp.cli", "mpamp.testing")
    assert [name for name in report["new"] if name.startswith(parts)] == []


def test_import_does_not_load_the_compiler(report: dict[str, Any]) -> None:
    assert [name for name in report["new"] if name.startswith(("torch._dynamo", "torch._inductor"))] == []


def test_import_takes_little_time() -> None:
    assert best_ms() < LIMIT_MS


SLOW_FINDER = """
import sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "mpamp.optable":
            end = time.process_time() + 0.06
            while time.process_time() < end:
                pass
sys.meta_path.insert(0, Slow())
"""


def test_the_check_of_time_can_fail() -> None:
    assert best_ms(SLOW_FINDER) > LIMIT_MS


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """Install a distribution with a plugin that leaves a mark when it is imported."""
    info = tmp_path / "mpamp_trap-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mpamp-trap\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mpamp]\ntrapped = mpamp_trap\n")
    (tmp_path / "mpamp_trap.py").write_text(
        "from mpamp.backends.base import Backend\n"
        "class Trap(Backend):\n    device_type = 'trapped'\n    autocast_key = 'AutocastPrivateUse1'\n"
        "def mpamp_backends():\n    return [Trap()]\n"
    )
    return tmp_path


def test_import_loads_no_plugin(trap: Path) -> None:
    assert "mpamp_trap" not in import_mpamp(path=trap)["new"]


def test_the_check_of_plugins_can_fail(trap: Path) -> None:
    asking = "from mpamp.plugins.manager import manager\nmanager().backend('trapped')"
    assert "mpamp_trap" in import_mpamp(path=trap, epilogue=asking)["new"]
