"""The libraries in mpamp's wheel: one for each minor version of torch, for the wheel's Python and platform.

One is picked by torch's version and never by trying: another minor's can be opened, and ends the process later. So may
a build of torch that was compiled with other flags than PyTorch's own.
"""

from __future__ import annotations

import functools
import platform
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

from ...errors import EngineError
from ...torch_internals import GLIBCXX_USE_CXX11_ABI, cxx_flags
from . import store, toolchain

__all__ = ["FOLDER", "lack", "library", "load", "served"]

FOLDER = Path(__file__).parent / "prebuilt"


def served() -> list[str]:
    """Return the minor versions of torch that this mpamp has libraries for, on this Python and machine."""
    before, after = toolchain.library_name("*").split("*")
    names = (path.name for path in FOLDER.glob(f"{before}*{after}"))
    return sorted((name[len(before) : -len(after)] for name in names), key=_in_numbers)


def _in_numbers(minor: str) -> tuple[int, ...]:
    return tuple(int(part) for part in minor.split(".") if part.isdigit())


_HARMLESS = {"-ffunction-sections", "-fdata-sections"}
"""What PyTorch's releases for aarch64 are compiled with besides torch's own flags."""


def _otherwise() -> str | None:
    """Return how torch differs from a release of PyTorch's own, in words; None where it doesn't.

    ``torch.__config__.show`` would say more, and asks CUDA's driver: processes can't be forked after that.
    """
    if toolchain.release(torch.__version__) is None:
        return "it is no release of PyTorch's own"
    flags = str(cxx_flags())
    others, own, _ = flags.partition("-fvisibility-inlines-hidden")  # those of who built it come before torch's own
    unknown = [flag for flag in others.split() if flag not in _HARMLESS]
    if unknown or not own:
        return f"it was compiled with other flags than PyTorch's releases ({' '.join(unknown)})"
    if torch.version.debug or "-DNDEBUG" not in flags.split():
        return "it was compiled for debugging"
    if sys.platform == "linux" and not GLIBCXX_USE_CXX11_ABI:
        return "it was compiled with the ABI of before C++11"
    if len(str(torch.version.git_version)) != 40:
        return "it was not compiled from a commit of PyTorch's, as releases are"
    return None


def library() -> Path | None:
    """Return the library for the torch that is here; None where there is none, or that torch is built otherwise."""
    minor = toolchain.release(torch.__version__)
    if minor not in served() or _otherwise():
        return None
    return FOLDER / toolchain.library_name(minor)


@functools.cache
def load() -> Any | None:
    """Return the module for the torch that is here; None where the wheel has none.

    Raises:
        EngineError: It can't be loaded.
    """
    path = library()
    if path is None:
        return None
    try:
        return store.opened(path)
    except ImportError as error:
        raise EngineError(f"{path.name} of mpamp's wheel can't be loaded ({error}).") from error


def lack() -> str:
    """Return in one line what this mpamp's libraries are for, what torch is, and what to do, where none fits."""
    minors, otherwise = served(), _otherwise()
    mine = f"torch {torch.__version__}, Python {platform.python_version()} on {sysconfig.get_platform()}"
    newest = _in_numbers(minors[-1]) if minors else None
    is_newer = newest is not None and not otherwise and _in_numbers(torch.__version__.partition("+")[0])[:2] > newest
    remedy = "install a newer mpamp, or run mpamp build-core" if is_newer else "run mpamp build-core"
    lacking = toolchain.missing(Path(torch.__file__).parent)
    if lacking:
        remedy += f", which needs {' and '.join(lacking)} here"
    if not minors:
        return f"this mpamp came without compiled engines (here are {mine}): {remedy}"
    through = minors[0] if len(minors) == 1 else f"{minors[0]} to {minors[-1]}"
    if len(minors) > 1 and not _are_all_between(minors):
        through = ", ".join(minors)
    there = f"this mpamp has compiled engines for PyTorch's releases of torch {through} on this Python"
    return f"{there}; here is torch {torch.__version__}{f', and {otherwise}' if otherwise else ''}: {remedy}"


def _are_all_between(minors: list[str]) -> bool:
    numbers = [_in_numbers(minor) for minor in minors]
    return len({n[0] for n in numbers}) == 1 and numbers[-1][-1] - numbers[0][-1] == len(numbers) - 1
