"""Compiles the engine against the installed torch: what ``mpamp build-core`` does."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from ...errors import EngineError
from . import store

__all__ = ["build", "missing"]

_BUILD = """
import sys
from torch.utils import cpp_extension
name, source, folder, *flags = sys.argv[1:]
cpp_extension.load(name, [source], build_directory=folder, extra_cflags=flags, verbose=True)
"""


def missing() -> list[str]:
    """Return what this machine lacks to build, a clause each."""
    from torch.utils import cpp_extension

    found = []
    if shutil.which(cpp_extension.get_cxx_compiler()) is None:
        found.append(f"a C++ compiler ({cpp_extension.get_cxx_compiler()}; set CXX for another)")
    if shutil.which("ninja") is None and importlib.util.find_spec("ninja") is None:
        found.append("ninja (pip install ninja, or mpamp[native])")
    include = Path(sys.base_prefix) / "include"
    if not any(include.rglob("Python.h")) and not any(Path("/usr/include").glob("python3*/Python.h")):
        found.append("Python's headers (python3-dev)")
    return found


def build(*, force: bool = False) -> Path:
    """Compile the engine for the installed torch and return the library; one that is there already is kept.

    Two processes may build at once: each does so in a folder of its own, and the last one's result stays.

    Args:
        force: Build although there is one.

    Raises:
        EngineError: A tool is missing, or the compiler fails; nothing has changed then.
    """
    if not force and store.note().exists():
        return store.library()
    lacking = missing()
    if lacking:
        raise EngineError(f"the compiled engine needs {' and '.join(lacking)}.")
    store.directory().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=store.directory().parent, prefix="building-") as folder:
        _compile(Path(folder))
        made = Path(folder) / store.library().name
        sign = Path(folder) / store.note().name
        sign.write_text(store.checksum(made), encoding="utf-8")
        store.note().unlink(missing_ok=True)
        os.replace(made, store.library())
        os.replace(sign, store.note())
    return store.library()


def _compile(folder: Path) -> None:
    standard = "-std=c++20" if torch.__version__ >= torch.torch_version.TorchVersion("2.10") else "-std=c++17"
    command = [sys.executable, "-c", _BUILD, store.NAME, str(store.SOURCE / "core.cpp"), str(folder), "-O2", standard]
    scripts = os.path.dirname(sys.executable)  # ninja may have been installed beside Python
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines()
        errors = [line for line in lines if "error" in line.lower()] or lines
        raise EngineError("the compiled engine could not be built:\n" + "\n".join(errors[-20:]))
