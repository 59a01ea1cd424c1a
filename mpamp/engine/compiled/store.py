"""Where builds of the compiled engine are kept: one for each torch, Python, ABI and source, in the user's cache.

A build is a library and a note of its checksum beside it. Both are written elsewhere and moved into place, the note
last: what is half written, was made of other source, or is somebody else's is never loaded.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

from ...errors import EngineError

__all__ = ["NAME", "SOURCE", "checksum", "directory", "library", "load", "note", "sources"]

NAME = "mpamp_core"
SOURCE = Path(__file__).parent / "csrc"


def sources() -> list[Path]:
    """Return the files that a build is made of, in alphabetical order."""
    return sorted(path for path in SOURCE.iterdir() if path.suffix in (".h", ".cpp"))


@functools.cache
def _key() -> str:
    parts = [torch.__version__, str(torch._C._GLIBCXX_USE_CXX11_ABI), sysconfig.get_config_var("SOABI") or sys.version]
    digest = hashlib.sha256("\n".join(parts).encode())
    for path in sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"torch{torch.__version__.partition('+')[0]}-{sys.implementation.cache_tag}-{digest.hexdigest()[:16]}"


def directory() -> Path:
    """Return where the build for this torch, Python and source is, or would be."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "mpamp" / "core" / _key()


def library() -> Path:
    """Return the build's library."""
    return directory() / f"{NAME}.so"


def note() -> Path:
    """Return what is written last: the library's checksum."""
    return directory() / f"{NAME}.sha256"


def checksum(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


@functools.cache
def load() -> Any | None:
    """Return the built module, or None where there is no build.

    Raises:
        EngineError: There is one, and it can't be used.
    """
    remedy = f"run mpamp build-core --force, or remove {directory()}."
    if not note().exists():
        return None
    stat = directory().stat()
    if hasattr(os, "getuid") and stat.st_uid not in (os.getuid(), 0):
        raise EngineError(f"the build in {directory()} belongs to another user: it is not loaded; remove it.")
    if not library().exists() or checksum(library()) != note().read_text(encoding="utf-8").strip():
        raise EngineError(f"the build in {directory()} isn't whole: {remedy}")
    try:
        loader = importlib.machinery.ExtensionFileLoader(NAME, str(library()))
        spec = importlib.util.spec_from_loader(NAME, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise EngineError(f"the build in {directory()} can't be loaded ({error}): {remedy}") from error
    return module
