"""Make mpamp's wheel, with compiled engines in it.

    wheel.py OUT                              with the engine for the torch that is installed here
    wheel.py OUT --torch FOLDER ...           with those for other torches, each an unpacked wheel of torch
    wheel.py OUT --library FILE ...           with libraries made before, by the next line or by mpamp build-core
    wheel.py OUT --only-libraries --torch ... the libraries alone
    wheel.py OUT --none                       without any: the wheel for every platform, with the engine in Python

It runs with the Python that the wheel is for, which needs setuptools 70.1 or newer; torch need not be installed.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOOLCHAIN: dict[str, Any] = runpy.run_path(str(ROOT / "mpamp/engine/compiled/toolchain.py"))
SYMBOLS: dict[str, Any] = runpy.run_path(str(ROOT / "tools/symbols.py"))
PREBUILT = "mpamp/engine/compiled/prebuilt"
PACKAGED = ("mpamp", "setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")

# The newest version of a symbol of each library that a manylinux tag allows: glibc's is the tag's own.
_LIBSTDCXX = [((2, 17), (3, 4, 19)), ((2, 24), (3, 4, 22)), ((2, 28), (3, 4, 24)), ((2, 31), (3, 4, 28))]
_LIBSTDCXX += [((2, 34), (3, 4, 29)), ((2, 35), (3, 4, 30)), ((2, 38), (3, 4, 31)), ((2, 39), (3, 4, 33))]


class WheelError(SystemExit):
    """Something is missing, or isn't as it must be; the message says what."""


def main(argv: list[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        libraries = Path(folder) / "prebuilt"
        libraries.mkdir()
        for file in options.library:
            shutil.copyfile(file, libraries / _name_of(file))
        if not options.none and (options.torch or not options.library):
            compile_all(options.torch or [_installed()], libraries, jobs=options.jobs)
        for library in libraries.iterdir():
            strip(library)
        made = sorted(libraries.iterdir()) if options.only_libraries else [assemble(libraries, Path(folder))]
        for path in made:
            print(shutil.copy(path, options.out))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder that gets what is made")
    parser.add_argument("--torch", type=Path, action="append", default=[], metavar="FOLDER", help="an unpacked wheel")
    parser.add_argument("--library", type=Path, action="append", default=[], metavar="FILE", help="made before")
    parser.add_argument("--only-libraries", action="store_true", help="make no wheel")
    parser.add_argument("--none", action="store_true", help="without compiled engines")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="compilers at a time; each takes 1.4 GB")
    return parser


# -- The libraries -------------------------------------------------------------------------------------


def _installed() -> Path:
    import torch

    return Path(torch.__file__).parent


def version_of(torch: Path) -> str:
    """Return the version of the torch in a folder."""
    found = re.search(r"^__version__ = ['\"](.+)['\"]$", (torch / "version.py").read_text(), flags=re.M)
    if found is None:
        raise WheelError(f"{torch / 'version.py'} says no version.")
    return found[1]


def _minor_of(version: str) -> str:
    minor: str | None = TOOLCHAIN["release"](version)
    if minor is None:
        raise WheelError(f"torch {version} is no release of PyTorch's own: a wheel has engines for those only.")
    return minor


def _name_of(library: Path) -> str:
    """Return a library's name in the wheel; build-core's are in a folder that begins with torch's version."""
    if library.name.startswith(TOOLCHAIN["library_name"]("")[: len("mpamp_core-torch")]):
        return library.name
    version = re.match(r"torch([^-]+)-", library.parent.name)
    if version is None:
        raise WheelError(f"{library} doesn't say which torch it is for.")
    return str(TOOLCHAIN["library_name"](_minor_of(version[1])))


def compile_all(torches: Iterable[Path], out: Path, *, jobs: int = 1) -> None:
    """Compile an engine for each torch."""
    folders = [path if (path / "version.py").exists() else path / "torch" for path in torches]
    with ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(lambda torch: compile_one(torch, out), folders):
            pass


def compile_one(torch: Path, out: Path, *, run: Callable[..., Any] = subprocess.run) -> None:
    """Compile the engine for the torch in a folder into ``out``."""
    lacking = TOOLCHAIN["missing"](torch)
    if lacking:
        raise WheelError(f"an engine for {torch} needs {' and '.join(lacking)}.")
    version = version_of(torch)
    library = out / TOOLCHAIN["library_name"](_minor_of(version))
    if library.exists():
        raise WheelError(f"two libraries for torch {version}: one for each minor version.")
    command = TOOLCHAIN["command"](torch, version, library)
    if run(command, check=False).returncode:
        raise WheelError(f"the engine for torch {version} could not be compiled.")
    print(f"compiled for torch {version}", file=sys.stderr)


def strip(library: Path) -> None:
    """Take out what isn't needed to load a library, once it is seen to look nothing of torch's up in pybind11."""
    lookups = SYMBOLS["lookups"](library)
    if lookups:
        raise WheelError(f"{library.name} looks types up in pybind11's registry, which is torch's: {lookups[0]}")
    subprocess.run(["strip", "-x" if sys.platform == "darwin" else "--strip-unneeded", library], check=True)


# -- The wheel -----------------------------------------------------------------------------------------


def assemble(libraries: Path, scratch: Path) -> Path:
    """Make the wheel with the libraries of a folder, which may be empty, and return it."""
    source, out = scratch / "source", scratch / "wheel"
    source.mkdir()
    for name in PACKAGED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.py[cod]", "prebuilt")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source)
    settings: dict[str, Any] = {}
    made = sorted(libraries.iterdir())
    if made:
        shutil.copytree(libraries, source / PREBUILT)
        tag = manylinux(made) if sys.platform == "linux" else None
        settings = {"--build-option": ["--plat-name", tag]} if tag else {}
    script = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1], eval(sys.argv[2]))"
    command = [sys.executable, "-c", script, str(out), repr(settings)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WheelError(f"setuptools made no wheel:\n{(done.stdout + done.stderr)[-3000:]}")
    (wheel,) = out.glob("*.whl")
    return wheel


def manylinux(libraries: Iterable[Path]) -> str | None:
    """Return the platform tag that the libraries' symbols allow; None where it isn't glibc's Linux."""
    if "-gnu" not in TOOLCHAIN["library_name"](""):
        return None
    needed = "".join(
        subprocess.run(["objdump", "-T", library], capture_output=True, text=True, check=True).stdout
        for library in libraries
    )
    glibc = max(_versions("GLIBC", needed), default=(2, 17))
    libstdcxx = max(_versions("GLIBCXX", needed), default=(3, 4))
    floor = next((tag for tag, newest in _LIBSTDCXX if libstdcxx <= newest), None)
    if floor is None:
        raise WheelError(f"no manylinux tag allows GLIBCXX_{'.'.join(map(str, libstdcxx))}: compile with an older gcc.")
    major, minor = max(glibc, floor, (2, 28))  # torch's own wheels need 2.28
    return f"manylinux_{major}_{minor}_{os.uname().machine}"


def _versions(library: str, symbols: str) -> set[tuple[int, ...]]:
    found = re.findall(rf"\b{library}_(\d+(?:\.\d+)+)", symbols)
    return {tuple(int(part) for part in version.split(".")) for version in found}


if __name__ == "__main__":
    main()
