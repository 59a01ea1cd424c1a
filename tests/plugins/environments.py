"""Fresh environments with real wheels in them, made without a network."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.version import Version

ROOT = Path(__file__).parents[2]
PLUGINS = Path(__file__).parent
EXAMPLES = [ROOT / "examples" / name for name in ("mpamp-npy", "mpamp-pack")]
_JUNK = shutil.ignore_patterns("build", "*.egg-info", "__pycache__", ".git", "tests", "*_cache")


def can_build() -> bool:
    """Tell whether wheels can be built without a network."""
    try:
        return Version(importlib.metadata.version("setuptools")) >= Version("70.1") or bool(find_spec("wheel"))
    except importlib.metadata.PackageNotFoundError:
        return False


def build_wheels(shared: Path) -> Path:
    """Build mpamp, the examples and the failing plugins once for all workers; return the folder of wheels."""
    wheels, sources = shared / "wheels", shared / "sources"
    with open(shared / "wheels.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not wheels.exists():
            projects = [ROOT, *EXAMPLES, *(p.parent for p in sorted(PLUGINS.glob("*/setup.cfg")))]
            copies = [_copy(project, sources / project.name) for project in projects]
            _pip("wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(shared / "built"), *copies)
            (shared / "built").rename(wheels)
    return wheels


def _copy(project: Path, to: Path) -> str:
    if project == ROOT:  # only what the wheel is made of
        shutil.copytree(ROOT / "mpamp", to / "mpamp", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, to / name)
    else:
        shutil.copytree(project, to, ignore=_JUNK)
    return str(to)


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return _run(command, {}).stdout


def _run(command: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MPAMP_", "PYTHONPATH"))}
    done = subprocess.run(command, env={**kept, **variables}, capture_output=True, text=True, cwd="/", check=False)
    if command[1:3] == ["-m", "pip"] and done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done


@dataclass(frozen=True)
class Environment:
    """A virtual environment that sees this one's packages, and has its own in front of them."""

    folder: Path
    wheels: Path

    @classmethod
    def make(cls, folder: Path, wheels: Path, *distributions: str) -> Environment:
        """Make one with mpamp and some distributions installed."""
        venv.create(folder, with_pip=False, symlinks=True)
        self = cls(folder, wheels)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "torchs.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        self.install("mpamp", *distributions)
        return self

    def install(self, *distributions: str) -> None:
        options = ["--no-index", "--no-deps", "--ignore-installed", "--find-links", str(self.wheels)]
        _pip("--python", str(self.folder / "bin" / "python"), "install", "-q", *options, *distributions)

    def uninstall(self, *distributions: str) -> None:
        _pip("--python", str(self.folder / "bin" / "python"), "uninstall", "-q", "-y", *distributions)

    def mpamp(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the ``mpamp`` command; keywords are environment variables."""
        return _run([str(self.folder / "bin" / "mpamp"), *arguments], variables)

    def python(self, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return _run([str(self.folder / "bin" / "python"), "-c", code], variables)

    def plugins(self, **variables: str) -> tuple[int, dict[str, dict[str, Any]], list[str]]:
        """Return the exit code of ``mpamp plugins --json``, the third party's plugins by distribution, the problems."""
        done = self.mpamp("plugins", "--json", **variables)
        assert done.stdout, done.stderr
        found = json.loads(done.stdout)
        records = {r["distribution"]: r for r in found["plugins"] if r["distribution"] != "mpamp"}
        return done.returncode, records, found["problems"]
