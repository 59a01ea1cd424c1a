"""Compiles the engine against the installed torch: what ``mpamp build-core`` does."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ...errors import EngineError
from ...torch_internals import GLIBCXX_USE_CXX11_ABI
from . import store, toolchain

__all__ = ["build", "missing"]

_TORCH = Path(torch.__file__).parent


def missing() -> list[str]:
    """Return what this machine lacks to build, a clause each."""
    return toolchain.missing(_TORCH)


def build(*, force: bool = False) -> Path:
    """Compile the engine for the installed torch and return the library; one that is there already is kept.

    Two processes may build at once: each does so in a folder of its own, and the last one's result stays.

    Args:
        force: Build although there is one.

    Raises:
        EngineError: A tool is missing, the compiler fails, or the folder can't be written or is others' as well;
            nothing has changed then.
    """
    with _explained():
        if not force and store.note().exists():
            store.check(store.note())
            return store.library()
    lacking = missing()
    if lacking:
        raise EngineError(f"the compiled engine needs {' and '.join(lacking)}.")
    with _explained():
        _make(store.directory())
        with tempfile.TemporaryDirectory(dir=store.directory().parent, prefix="building-") as folder:
            _compile(Path(folder))
            made, sign = Path(folder) / store.library().name, Path(folder) / store.note().name
            sign.write_text(store.checksum(made), encoding="utf-8")
            for file in (made, sign):
                file.chmod(file.stat().st_mode & ~0o022)
            store.note().unlink(missing_ok=True)
            os.replace(made, store.library())
            os.replace(sign, store.note())
    return store.library()


@contextmanager
def _explained() -> Iterator[None]:
    """Say which folder it was about, and which setting there is, where the system refuses."""
    try:
        yield
    except OSError as error:
        what = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
        raise EngineError(
            f"no build can be kept in {store.directory()} ({what}): set XDG_CACHE_HOME to a folder that you may write."
        ) from error


def _make(folder: Path) -> None:
    """Make a folder, and those above it that aren't there, that nobody else may write."""
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            each.mkdir(mode=0o755, exist_ok=True)
    store.check(folder)


def _compile(folder: Path) -> None:
    abi = bool(GLIBCXX_USE_CXX11_ABI)
    command = toolchain.command(_TORCH, torch.__version__, folder / store.library().name, has_cxx11_abi=abi)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines()
        errors = [line for line in lines if "error" in line.lower()] or lines
        raise EngineError("the compiled engine could not be built:\n" + "\n".join(errors[-20:]))
