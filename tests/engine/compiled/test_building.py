"""``mpamp build-core``: what it needs, what it leaves behind, and what it says where it can't."""

from __future__ import annotations

import os
import shutil
import subprocess
import types
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpamp.cli.app import app
from mpamp.engine.compiled import building, store, toolchain
from mpamp.errors import EngineError


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A compiler that takes no time; the folders that it was called for."""
    made = []

    def compile_(folder: Path) -> None:
        made.append(folder)
        (folder / store.library().name).write_bytes(b"new")

    monkeypatch.setattr(building, "missing", list)
    monkeypatch.setattr(building, "_compile", compile_)
    return made


def put_old() -> None:
    store.directory().mkdir(parents=True)
    store.library().write_bytes(b"old")
    store.note().write_text("1")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(building, "_TORCH", tmp_path)
    monkeypatch.setenv("CXX", "ccache sc++")
    found = building.missing()
    assert ["C++ compiler (ccache" in found[0], "Python.h" not in found[0]] == [True, True]
    assert "Python's headers" in found[1]
    assert "torch's headers" in found[2]
    with pytest.raises(EngineError, match=r"needs a C\+\+ compiler .* and Python's headers .* and torch's headers"):
        building.build()
    assert not store.directory().exists()


def test_nothing_but_a_compiler_and_headers_is_needed() -> None:
    command = toolchain.command(Path("/torch"), "2.9.1+cpu", Path("/out.so"))
    assert {"-std=c++17", "-fvisibility=hidden", "-D_GLIBCXX_USE_CXX11_ABI=1", "-L/torch/lib"} <= set(command)
    assert "-std=c++20" in toolchain.command(Path("/torch"), "2.10.0", Path("/out.so"))
    assert not any("ninja" in word for word in command)


def test_windows_is_told_that_it_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "sys", types.SimpleNamespace(platform="win32"))
    assert toolchain.missing(Path()) == ["a system other than Windows (it has not been made for Microsoft's compiler)"]


def test_a_compiler_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "core.cpp:1: error: no such thing")

    put_old()
    monkeypatch.setattr(building, "missing", list)
    monkeypatch.setattr(building.subprocess, "run", fail)
    with pytest.raises(EngineError, match="no such thing"):
        building.build(force=True)
    assert (store.library().read_bytes(), store.note().read_text()) == (b"old", "1")
    assert [path.name for path in store.directory().parent.iterdir()] == [store.directory().name]


def test_a_build_is_moved_into_place_and_kept(compiled: list[Path]) -> None:
    assert building.build() == building.build() == store.library()
    assert len(compiled) == 1
    assert store.note().read_text() == store.checksum(store.library())
    building.build(force=True)
    assert len(compiled) == 2
    assert not any(folder.exists() for folder in compiled)


@pytest.mark.skipif(os.name == "nt", reason="files have no mode here")
@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_nobody_else_may_write_what_is_made(umask: int, compiled: list[Path], tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        building.build()
    finally:
        os.umask(before)
    for path in (store.library(), store.note()):
        store.check(path)


# -- Folders that can't be used ------------------------------------------------------------------------


def blocked(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make the cache unusable in one way, and return what the message must have."""
    if kind == "a file":
        (tmp_path / "mpamp").write_text("")
        return r"Not a directory|File exists"
    if kind == "read-only":
        monkeypatch.setattr(Path, "mkdir", _refusing(30, "Read-only file system"))
        return "Read-only file system"
    if kind == "no permission":
        monkeypatch.setattr(Path, "mkdir", _refusing(13, "Permission denied"))
        return "Permission denied"
    monkeypatch.setattr(building.os, "replace", _refusing(28, "No space left on device"))
    return "No space left on device"


def _refusing(number: int, text: str) -> object:
    def refuse(path: object, *args: object, **options: object) -> None:
        raise OSError(number, text, str(path))

    return refuse


@pytest.mark.parametrize("kind", ["a file", "read-only", "no permission", "full"])
def test_a_cache_that_cannot_be_written_is_named_with_the_setting(
    kind: str, tmp_path: Path, compiled: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = blocked(tmp_path, kind, monkeypatch)
    with pytest.raises(EngineError, match=rf"kept in {tmp_path}.*({reason}).*set XDG_CACHE_HOME to a folder") as caught:
        building.build()
    assert not isinstance(caught.value, OSError)
    assert kind == "full" or not compiled  # it is seen before a minute's work


@pytest.mark.skipif(os.name == "nt", reason="files have no mode here")
def test_nothing_is_compiled_into_a_folder_that_others_may_write(tmp_path: Path, compiled: list[Path]) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(EngineError, match=f"others may write {tmp_path} "):
        building.build()
    assert not compiled


# -- The command ---------------------------------------------------------------------------------------


def test_the_command_may_be_allowed_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "missing", lambda: ["a C++ compiler (c++; set CXX for another)"])
    failed = CliRunner().invoke(app, ["build-core"])
    assert (failed.exit_code, failed.stdout) == (1, "")
    assert "Error: the compiled engine needs a C++ compiler" in failed.stderr
    tried = CliRunner().invoke(app, ["build-core", "--try"])
    assert (tried.exit_code, tried.stdout) == (0, "")
    assert "The engine in Python runs: the compiled engine needs a C++ compiler" in tried.stderr
