"""The libraries in mpamp's wheel: which torch is given which, and that no other is ever opened."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mpamp.engine import compiled
from mpamp.engine.compiled import shipped, store, toolchain
from mpamp.errors import EngineError
from tests import processes

MINORS = [f"2.{minor}" for minor in range(8, 15)]
RELEASES = {
    "2.8.0+cu128": "2.8",
    "2.9.1": "2.9",
    "2.10.0.post1": "2.10",
    "2.10.0.post2+cpu": "2.10",
    "2.11.0+rocm7.1": "2.11",
    "2.12.1+xpu": "2.12",
    "2.13.0+cpu": "2.13",
    "2.14.7+cu130": "2.14",
}
OTHERS = [
    *("2.7.1", "2.15.0+cu130", "3.13.0", "1.13.0", "2.1.0", "2.80.0"),
    *("2.13.0a0+gitcf30153", "2.13.0.dev20260901+cu130", "2.13.0rc1", "2.13.0+gitcf30153", "2.13.0+cpu.cxx11.abi"),
    *("2.9.0a0+145a3a7.nv25.10", "2.13.0+debian", "2.13", "2.13.0+cu130.with.pypi.cudnn", "2.13.0 ", "unknown", ""),
]
FLAGS = torch._C._cxx_flags()
IS_RELEASE = shipped._otherwise() is None


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A wheel's folder with a file for every minor version, of which none is a library; no build of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = tmp_path / "prebuilt"
    made.mkdir()
    for minor in MINORS:
        (made / toolchain.library_name(minor)).write_bytes(b"no library")
    monkeypatch.setattr(shipped, "FOLDER", made)
    for module in (store, shipped):
        monkeypatch.setattr(module, "load", module.load.__wrapped__)
    as_release(monkeypatch)
    return made


def as_release(monkeypatch: pytest.MonkeyPatch, version: str = "2.13.0+cpu") -> None:
    monkeypatch.setattr(torch, "__version__", version)
    for module in (store, shipped):
        monkeypatch.setattr(module, "cxx_flags", lambda: " -fvisibility-inlines-hidden -DNDEBUG -O2")
        monkeypatch.setattr(module, "GLIBCXX_USE_CXX11_ABI", True)
    monkeypatch.setattr(torch.version, "git_version", "cf30153c4c131c8164ee7798e5022d810682e2cb")
    monkeypatch.setattr(torch.version, "debug", False)


# -- Which library -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "minor"), RELEASES.items())
def test_a_release_gets_the_library_of_its_minor(version: str, minor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_release(monkeypatch, version)
    assert shipped.library() == shipped.FOLDER / toolchain.library_name(minor)


@pytest.mark.parametrize("version", OTHERS)
def test_any_other_version_gets_none(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_release(monkeypatch, version)
    assert shipped.library() is None
    assert shipped.load() is None


def test_other_pythons_and_machines_have_other_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shipped.served() == MINORS
    assert toolchain.library_name("2.13").endswith(toolchain.sysconfig.get_config_var("EXT_SUFFIX"))
    with monkeypatch.context() as patched:
        patched.setattr(toolchain.sysconfig, "get_config_var", lambda name: ".cpython-399-x86_64-linux-gnu.so")
        assert (shipped.served(), shipped.library()) == ([], None)
    monkeypatch.setattr(toolchain.platform, "machine", lambda: "loongarch64")
    assert (shipped.served(), shipped.library()) == ([], None)


_ASKED = "mpamp.engine.compiled.shipped."
OTHERWISE: dict[str, tuple[str, Any, str]] = {
    "conda-forge": (
        "mpamp.engine.compiled.shipped.cxx_flags",
        f"-march=nocona -fno-plt -I/conda/include{FLAGS}",
        "-march=nocona",
    ),
    "assertions": (
        "mpamp.engine.compiled.shipped.cxx_flags",
        f"-Wp,-D_GLIBCXX_ASSERTIONS{FLAGS}",
        "_GLIBCXX_ASSERTIONS",
    ),
    "other flags": (_ASKED + "cxx_flags", "-O3 -DNDEBUG", "other flags than PyTorch's releases"),
    "debugging": (_ASKED + "cxx_flags", " -fvisibility-inlines-hidden -O0 -g", "for debugging"),
    "a debug build": ("torch.version.debug", True, "for debugging"),
    "old strings": (_ASKED + "GLIBCXX_USE_CXX11_ABI", False, "the ABI of before C\\+\\+11"),
    "a tarball": ("torch.version.git_version", "Unknown", "not compiled from a commit"),
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_a_torch_that_is_built_otherwise_gets_none(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == "old strings" and sys.platform != "linux":
        pytest.skip("libstdc++'s")
    name, value, said = OTHERWISE[case]
    monkeypatch.setattr(name, (lambda: value) if "flags" in name else value)
    assert shipped.library() is None
    with pytest.raises(EngineError, match=said):
        raise EngineError(shipped.lack())


def test_releases_for_aarch64_have_two_flags_more(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = " -ffunction-sections -fdata-sections -fvisibility-inlines-hidden -DNDEBUG"
    monkeypatch.setattr(shipped, "cxx_flags", lambda: flags)
    assert shipped.library() is not None


# -- What is opened ------------------------------------------------------------------------------------

_OPEN = """
import json, os, sys, torch
from pathlib import Path
from mpamp.engine import compiled
from mpamp.engine.compiled import shipped
folder, versions = sys.argv[1], sys.argv[2:]
seen = set()
def note(event, args):
    if event in ("open", "import", "ctypes.dlopen", "os.open"):
        seen.update(a for a in args if isinstance(a, str) and a.startswith(folder))
sys.addaudithook(note)
open(os.path.join(folder, "canary")).close()
assert seen, "the hook sees nothing"
shipped.FOLDER = Path(folder)
shipped.cxx_flags = lambda: " -fvisibility-inlines-hidden -DNDEBUG"
shipped.GLIBCXX_USE_CXX11_ABI = True
torch.version.git_version = "c" * 40
found = {}
for version in versions:
    seen.clear()
    torch.__version__ = version
    compiled.core.cache_clear(); shipped.load.cache_clear()
    compiled.core()
    found[version] = sorted(os.path.basename(path) for path in seen)
print(json.dumps(found))
"""


def test_no_other_minors_library_is_opened_not_to_try_either(folder: Path) -> None:
    (folder / "canary").touch()
    environment = {**os.environ, "MPAMP_ENGINE": "auto"}
    done = processes.python("-W", "ignore", "-c", _OPEN, str(folder), *RELEASES, *OTHERS, env=environment)
    assert done.returncode == 0, done.stderr
    opened = json.loads(done.stdout)
    assert {version: opened[version] for version in OTHERS} == {version: [] for version in OTHERS}
    for version, minor in RELEASES.items():  # its own can't be loaded here: nothing is tried instead
        assert set(opened[version]) == {toolchain.library_name(minor)}, version


def test_what_cannot_be_loaded_is_warned_of_and_python_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.VARIABLE, "auto")
    with pytest.warns(UserWarning, match=r"mpamp_core-torch2.13-.* of mpamp's wheel can't be loaded"):
        assert compiled.core.__wrapped__() is None


# -- Where none fits -----------------------------------------------------------------------------------


def line(monkeypatch: pytest.MonkeyPatch, version: str, lacking: list[str] | None = None) -> str:
    as_release(monkeypatch, version)
    monkeypatch.setattr(toolchain, "missing", lambda folder: lacking or [])
    return shipped.lack()


def test_the_line_says_what_is_served_what_torch_is_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    there = "this mpamp has compiled engines for PyTorch's releases of torch 2.8 to 2.14 on this Python; here is torch"
    assert line(monkeypatch, "2.15.0+cu130") == (
        f"{there} 2.15.0+cu130: install a newer mpamp, or run mpamp build-core"
    )
    assert line(monkeypatch, "2.13.0a0+git") == (
        f"{there} 2.13.0a0+git, and it is no release of PyTorch's own: run mpamp build-core"
    )
    assert line(monkeypatch, "2.15.0", ["a C++ compiler"]).endswith(
        "or run mpamp build-core, which needs a C++ compiler here"
    )


def test_the_line_names_the_minors_that_there_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / toolchain.library_name("2.11")).unlink()
    assert "torch 2.8, 2.9, 2.10, 2.12, 2.13, 2.14 on" in line(monkeypatch, "2.11.0")
    for minor in set(MINORS) - {"2.13"}:
        (folder / toolchain.library_name(minor)).unlink(missing_ok=True)
    assert "releases of torch 2.13 on this Python; here is torch 2.11.0: run" in line(monkeypatch, "2.11.0")
    shutil.rmtree(folder)
    assert line(monkeypatch, "2.11.0").startswith("this mpamp came without compiled engines (here are torch 2.11.0, ")


def test_python_runs_without_a_warning_and_the_line_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    said = line(monkeypatch, "2.15.0")
    monkeypatch.setenv(compiled.VARIABLE, "auto")
    monkeypatch.setattr(compiled, "core", compiled.core.__wrapped__)
    assert compiled.which() == ("python", said)  # warnings are errors here
    monkeypatch.setenv(compiled.VARIABLE, "python")
    assert compiled.which() == ("python", "MPAMP_ENGINE=python")
    monkeypatch.setenv(compiled.VARIABLE, "compiled")
    with pytest.raises(EngineError, match="MPAMP_ENGINE=compiled, and this mpamp has compiled engines"):
        compiled.which()


# -- A real one ----------------------------------------------------------------------------------------

_TRAIN = """
import sys, torch, mpamp
from pathlib import Path
from mpamp.engine import which
from mpamp.engine.compiled import shipped
shipped.FOLDER = Path(sys.argv[1])
model, x = torch.nn.Linear(8, 4), torch.ones(2, 8)
with mpamp.autocast("cpu", torch.bfloat16):
    model(x).float().sum().backward()
print(*which())
"""


@pytest.mark.skipif(not IS_RELEASE, reason="torch is no release of PyTorch's own")
def test_a_library_for_this_torch_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    if not store.note().exists():
        pytest.skip("the compiled engine isn't built: mpamp build-core")
    name = toolchain.library_name(str(toolchain.release(torch.__version__)))
    shutil.copy(store.library(), folder / name)
    environment = {**os.environ, "MPAMP_ENGINE": "compiled", "XDG_CACHE_HOME": str(folder / "none")}
    done = processes.python("-c", _TRAIN, str(folder), env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["compiled", name, "of", "its", "wheel"]
