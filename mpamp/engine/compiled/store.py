"""Where builds of the compiled engine are kept: one for each torch, Python, ABI and source, in the user's cache.

A build is a library and a note of its checksum beside it. Both are written elsewhere and moved into place, the note
last: what is half written, was made of other source, is another user's or could be replaced by one is never loaded.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import stat
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ...errors import EngineError
from ...torch_internals import GLIBCXX_USE_CXX11_ABI, cxx_flags
from .toolchain import NAME, SOURCE

__all__ = ["OthersBuildError", "check", "checksum", "directory", "library", "load", "note", "opened", "sources"]


class OthersBuildError(EngineError):
    """The build that is there belongs to another user; root with a user's home mounted has that in every process."""


def sources() -> list[Path]:
    """Return the files that a build is made of, in alphabetical order."""
    return sorted(path for path in SOURCE.iterdir() if path.suffix in (".h", ".cpp"))


@functools.cache
def _key() -> str:
    version = torch.__version__
    parts = [version, str(GLIBCXX_USE_CXX11_ABI), sysconfig.get_config_var("SOABI") or sys.version]
    parts += [str(torch.version.git_version), cxx_flags()]  # builds of others may all be called 2.13.0
    digest = hashlib.sha256("\n".join(parts).encode())
    for path in sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"torch{version.partition('+')[0]}-{sys.implementation.cache_tag}-{digest.hexdigest()[:16]}"


def _base() -> Path | None:
    for path in (os.environ.get("XDG_CACHE_HOME", ""), os.path.join(os.path.expanduser("~"), ".cache")):
        if os.path.isabs(path):  # others are to be ignored, says the standard
            return Path(path)
    return None


def directory() -> Path:
    """Return where the build for this torch, Python and source is, or would be.

    Raises:
        EngineError: There is no home, and no XDG_CACHE_HOME.
    """
    base = _base()
    if base is None:
        raise EngineError("there is no folder for a build of the compiled engine: set XDG_CACHE_HOME to one, or HOME.")
    return base / "mpamp" / "core" / _key()


def library() -> Path:
    """Return the build's library."""
    return directory() / f"{NAME}.so"


def note() -> Path:
    """Return what is written last: the library's checksum."""
    return directory() / f"{NAME}.sha256"


def checksum(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _around(path: Path) -> Iterator[Path]:
    """Yield a path and every folder above it, the way it is written and where links lead."""
    yield path
    yield from path.parents
    real = path.resolve()
    if real != path:
        yield real
        yield from real.parents


def check(path: Path) -> None:
    """Refuse what another user could have put there: the path, and each folder that it is in.

    A folder that everybody may write is fine if it has the sticky bit, as /tmp: nobody moves another's files there.

    Raises:
        OthersBuildError: It belongs to another user than this process's and root.
        EngineError: Others may write it.
    """
    if not hasattr(os, "getuid"):
        return  # Windows, where a user's folders are that user's
    for each in _around(path):
        found = each.stat()
        if not {found.st_uid, each.lstat().st_uid} <= {os.getuid(), 0}:
            raise OthersBuildError(f"{each} belongs to another user: nothing is loaded from {path}.")
        is_sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
        if found.st_mode & 0o022 and not is_sticky:
            raise EngineError(
                f"others may write {each} (mode {stat.S_IMODE(found.st_mode):o}): nothing is loaded from {path}. "
                f"Run chmod go-w {each}, or set XDG_CACHE_HOME to a folder that is yours alone."
            )


@functools.cache
def load() -> Any | None:
    """Return the built module, or None where there is no build.

    Raises:
        OthersBuildError: The build that is there is another user's.
        EngineError: There is one, and it can't be used.
    """
    if _base() is None:
        return None
    try:
        note().stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # a folder that this user may not look into
        raise OthersBuildError(f"{directory()} can't be read ({error.strerror}).") from error
    remedy = f"run mpamp build-core --force, or remove {directory()}."
    check(note())
    if not library().exists():
        raise EngineError(f"the build in {directory()} isn't whole: {remedy}")
    check(library())
    if checksum(library()) != note().read_text(encoding="utf-8").strip():
        raise EngineError(f"the build in {directory()} isn't whole: {remedy}")
    try:
        return opened(library())
    except ImportError as error:
        raise EngineError(f"the build in {directory()} can't be loaded ({error}): {remedy}") from error


def opened(path: Path) -> Any:
    """Return the module of a library.

    Raises:
        ImportError: It can't be loaded.
    """
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
