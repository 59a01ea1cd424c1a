"""How the engine is compiled, and what its library is called in a wheel.

Nothing but the standard library is needed here: ``tools/wheel.py`` compiles for a torch that isn't installed.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

__all__ = ["NAME", "SOURCE", "command", "library_name", "missing", "release"]

NAME = "mpamp_core"
"""The module's name, which the source gives to its initialization."""

SOURCE = Path(__file__).parent / "csrc"

_RELEASE = re.compile(r"(\d+\.\d+)\.\d+(?:\.post\d+)?(?:\+(?:cpu|cu\d+|rocm\d+(?:\.\d+)*|xpu))?", re.ASCII)


def release(version: str) -> str | None:
    """Return the major and minor version of a release of PyTorch's own; None for nightlies and builds of others.

    Example:
        >>> release("2.13.0+cu130"), release("2.10.0.post1"), release("2.13.1+rocm7.1")
        ('2.13', '2.10', '2.13')
        >>> release("2.15.0.dev20261101+cpu"), release("2.9.0a0+145a3a7.nv25.10"), release("2.13.0+gitabc")
        (None, None, None)
    """
    found = _RELEASE.fullmatch(version)
    return found[1] if found else None


def library_name(minor: str) -> str:
    """Return what the library for a minor version of torch is called in a wheel for this Python and machine."""
    return f"{NAME}-torch{minor}-{platform.machine().lower()}{sysconfig.get_config_var('EXT_SUFFIX')}"


def compiler() -> list[str]:
    """Return the C++ compiler's command: that of ``CXX``, else ``c++``."""
    return shlex.split(os.environ.get("CXX") or "c++")


def missing(torch: Path) -> list[str]:
    """Return what this machine lacks to compile the engine for the torch in a folder, a clause each."""
    if sys.platform == "win32":
        return ["a system other than Windows (it has not been made for Microsoft's compiler)"]
    found = []
    if shutil.which(compiler()[0]) is None:
        found.append(f"a C++ compiler ({compiler()[0]}; set CXX for another)")
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        found.append(f"Python's headers (python3-dev or python3-devel; {include} hasn't got them)")
    if not (torch / "include" / "torch" / "library.h").is_file():
        found.append(f"torch's headers ({torch / 'include'} hasn't got them)")
    return found


def command(torch: Path, version: str, library: Path, *, has_cxx11_abi: bool = True) -> list[str]:
    """Return the command that compiles the engine.

    Args:
        torch: The folder of torch, the package.
        version: Its version.
        library: The file to be made.
        has_cxx11_abi: Whether it was compiled with the newer strings of libstdc++, as releases are.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    standard = "c++20" if (major, minor) >= (2, 10) else "c++17"
    headers = (torch / "include", torch / "include/torch/csrc/api/include", Path(sysconfig.get_path("include")))
    linked = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-Wl,--as-needed"]
    return [
        *compiler(),
        *("-O2", "-g0", f"-std={standard}", "-fPIC", "-shared", "-fvisibility=hidden"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(has_cxx11_abi)}",
        *(f"-DTORCH_EXTENSION_NAME={NAME}", "-DTORCH_API_INCLUDE_EXTENSION_H"),
        *(word for folder in headers for word in ("-isystem", str(folder))),
        *(str(SOURCE / "core.cpp"), "-o", str(library)),
        *(f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python", *linked),
    ]
