"""Builds of the compiled engine: what is loaded, and what never is."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpamp.engine import compiled
from mpamp.engine.compiled import shipped, store
from mpamp.errors import EngineError, MpampWarning

HAS_BUILD = store.note().exists()


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache directory with nothing in it; what was loaded stays loaded for everybody else."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(store, "load", store.load.__wrapped__)
    monkeypatch.setattr(shipped, "load", shipped.load.__wrapped__)
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "prebuilt")


def put(content: bytes, checksum: str | None = None) -> None:
    store.directory().mkdir(parents=True)
    store.library().write_bytes(content)
    if checksum is not None:
        store.note().write_text(checksum)


def test_without_a_build_there_is_none() -> None:
    assert store.load() is None


def test_a_library_without_its_note_is_no_build() -> None:
    put(b"half")
    assert store.load() is None


def test_a_library_that_is_not_whole_is_refused() -> None:
    put(b"half", "0" * 64)
    with pytest.raises(EngineError, match=r"isn't whole: run mpamp build-core --force"):
        store.load()


def test_a_note_without_its_library_is_refused() -> None:
    put(b"x", "0" * 64)
    store.library().unlink()
    with pytest.raises(EngineError, match="isn't whole"):
        store.load()


def test_a_library_that_cannot_be_loaded_is_refused() -> None:
    put(b"no library")
    store.note().write_text(store.checksum(store.library()))
    with pytest.raises(EngineError, match=r"can't be loaded"):
        store.load()


# -- Whose the folders and files are -------------------------------------------------------------------


def put_whole(content: bytes = b"no library") -> None:
    put(content, hashlib.sha256(content).hexdigest())


def levels(tmp_path: Path) -> dict[str, Path]:
    """Every file and folder that a build is found by, up to the cache and the folder that it is in."""
    found = {"library": store.library(), "note": store.note(), "folder": store.directory()}
    above = {path.name: path for path in store.directory().parents if tmp_path in (path, *path.parents)}
    return {**found, **above, "cache": tmp_path}


UNIX = pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owner and mode here")


@UNIX
@pytest.mark.parametrize("level", ["library", "note", "folder", "core", "mpamp", "cache"])
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_what_others_may_write_is_not_loaded(
    level: str, mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    monkeypatch.setattr(store, "opened", opened.append)
    put_whole()
    store.load()
    path = levels(tmp_path)[level]
    path.chmod(mode)
    with pytest.raises(EngineError, match=rf"others may write {path} \(mode {mode:o}\).*chmod go-w {path}"):
        store.load()
    path.chmod(mode & ~0o022)
    store.load()
    assert opened == [store.library()] * 2


@UNIX
def test_a_folder_above_the_cache_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared" / "mine"))
    put_whole()
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(EngineError, match=f"others may write {tmp_path / 'shared'} "):
        store.load()
    (tmp_path / "shared").chmod(0o1777)  # as /tmp: nobody moves another's files there
    with pytest.raises(EngineError, match="can't be loaded"):
        store.load()


@UNIX
def test_a_link_does_not_hide_where_the_build_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "wide" / "real"))
    put_whole()
    (tmp_path / "wide").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "wide" / "real")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link"))
    with pytest.raises(EngineError, match=f"others may write {tmp_path / 'wide'} "):
        store.load()


@UNIX
@pytest.mark.parametrize("level", ["library", "note", "folder", "core", "mpamp", "cache"])
def test_what_is_another_users_is_left_alone_without_a_warning(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_whole()
    if os.geteuid() != 0:
        pytest.skip("needs to give files away")
    os.chown(levels(tmp_path)[level], 1234, -1)
    with pytest.raises(store.OthersBuildError, match="belongs to another user"):
        store.load()
    monkeypatch.setenv(compiled.VARIABLE, "auto")
    assert compiled.core.__wrapped__() is None  # warnings are errors here
    monkeypatch.setattr(compiled, "core", compiled.core.__wrapped__)
    name, why = compiled.which()
    assert name == "python"
    assert "belongs to another user" in why


@UNIX
def test_a_folder_that_may_not_be_read_is_no_build_and_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(store, "note", lambda: type("", (), {"stat": lambda self: refuse(Path("x"))})())
    with pytest.raises(store.OthersBuildError, match=r"can't be read \(Permission denied\)"):
        store.load()


@pytest.mark.parametrize("home", ["", "~", "relative"])
def test_without_a_home_there_is_no_build(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "a/relative/folder")
    monkeypatch.setattr(os.path, "expanduser", lambda path: home)
    assert store.load() is None
    with pytest.raises(EngineError, match="set XDG_CACHE_HOME to one, or HOME"):
        store.directory()


# -- What a build is for -------------------------------------------------------------------------------


def test_other_source_or_another_torch_is_another_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key = store._key.__wrapped__
    before = key()
    copied = tmp_path / "csrc"
    shutil.copytree(store.SOURCE, copied)
    monkeypatch.setattr(store, "SOURCE", copied)
    assert key() == before
    (copied / "core.cpp").write_text("// changed")
    assert key() != before
    monkeypatch.undo()
    for name, other in (("torch.__version__", "2.99.0"), ("mpamp.engine.compiled.store.cxx_flags", lambda: "-O0")):
        with monkeypatch.context() as patched:
            patched.setattr(name, other)
            assert key() != before


# -- Which engine --------------------------------------------------------------------------------------


def test_the_variable_takes_three_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for word in ("auto", "python", "compiled"):
        monkeypatch.setenv(compiled.VARIABLE, word)
        assert compiled.choice() == word
    monkeypatch.setenv(compiled.VARIABLE, "fast")
    with pytest.raises(EngineError, match="MPAMP_ENGINE='fast': it is one of auto, python, compiled"):
        compiled.choice()


def test_what_is_asked_for_and_not_built_is_an_error_that_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.VARIABLE, "compiled")
    with pytest.raises(EngineError, match="run mpamp build-core"):
        compiled.core.__wrapped__()


def test_a_broken_build_is_warned_of_and_python_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    put(b"half", "0" * 64)
    monkeypatch.setenv(compiled.VARIABLE, "auto")
    with pytest.warns(MpampWarning, match="a compiled engine is not used: .*isn't whole"):
        assert compiled.core.__wrapped__() is None
    monkeypatch.setenv(compiled.VARIABLE, "compiled")
    with (
        pytest.warns(MpampWarning, match="isn't whole"),
        pytest.raises(EngineError, match=r"MPAMP_ENGINE=compiled, and the build in .* isn't whole"),
    ):
        compiled.core.__wrapped__()


def test_the_users_own_build_goes_before_the_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    own, of_the_wheel = type("", (), {"__file__": "own.so"}), type("", (), {"__file__": "/a/of_the_wheel.so"})
    monkeypatch.setattr(store, "load", lambda: own)
    monkeypatch.setattr(shipped, "load", lambda: of_the_wheel)
    assert compiled._found() == (own, f"built in {store.directory()}")
    monkeypatch.setattr(store, "load", lambda: None)
    assert compiled._found() == (of_the_wheel, "of_the_wheel.so of its wheel")


def test_the_wheels_engine_runs_where_the_users_own_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    put(b"half", "0" * 64)
    of_the_wheel = type("", (), {"__file__": "of_the_wheel.so"})
    monkeypatch.setattr(shipped, "load", lambda: of_the_wheel)
    with pytest.warns(MpampWarning, match="isn't whole"):
        assert compiled._found()[0] is of_the_wheel


# -- The engine itself, in a process of its own --------------------------------------------------------

_EIGHT_THREADS = """
import threading, torch, mpamp
from mpamp.engine import which
assert which()[0] == "compiled", which()
weight, x = torch.nn.Parameter(torch.ones(8, 8)), torch.ones(4, 8)
stop, wrong = threading.Event(), []

def use(is_persistent):
    while not stop.is_set():
        with mpamp.autocast("cpu", torch.bfloat16, persistent_cache=is_persistent):
            y = torch.nn.functional.linear(x, weight)
            y.sum().backward() if is_persistent else None
        values = y.detach().float().unique().tolist()
        if y.dtype is not torch.bfloat16 or any(v % 8 for v in values):
            wrong.append(values)

threads = [threading.Thread(target=use, args=(i % 2 == 0,)) for i in range(8)]
for thread in threads: thread.start()
for value in range(2, 300):
    with torch.no_grad(): weight.fill_(value % 16)
    with mpamp.autocast("cpu", torch.bfloat16):
        seen = torch.nn.functional.linear(x, weight).unique().tolist()
    if seen != [8.0 * (value % 16)]: wrong.append((value, seen))
    if value % 50 == 0: mpamp.clear_cache()
stop.set()
for thread in threads: thread.join()
assert not wrong, wrong[:5]
"""
_COUNTS = """
import torch, mpamp
from mpamp.engine.python import kernels
x = torch.ones(2, 8)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
with mpamp.autocast("cpu", torch.bfloat16): pass
names = {type(library).__name__ for library in kernels._installed["cpu"].values()}
assert "Installed" in names, names
opt = torch.optim.SGD(model.parameters(), 0.1)
before = mpamp.cache_info()
for _ in range(3):
    for _ in range(2):
        with mpamp.autocast("cpu", torch.bfloat16, persistent_cache=True):
            loss = model(x).float().sum()
        loss.backward()
    opt.step(); opt.zero_grad()
after = mpamp.cache_info()
assert (after.casts - before.casts, after.recasts - before.recasts) == (16, 12), (before, after)
model.requires_grad_(False)
with mpamp.autocast("cpu", torch.bfloat16, persistent_cache=True):
    y = model(x)
assert torch.equal(y, torch.nn.functional.linear(torch.nn.functional.linear(x.bfloat16(),
    model[0].weight.bfloat16(), model[0].bias.bfloat16()), model[1].weight.bfloat16(), model[1].bias.bfloat16()))
assert mpamp.cache_info().casts == after.casts
del model, opt, loss, y
import gc; gc.collect()
assert mpamp.cache_info().entries == 0, mpamp.cache_info()
"""

_FIRST_IN_A_THREAD = """
import threading, torch, mpamp
from torch.utils.flop_counter import FlopCounterMode
weight, x, seen = torch.nn.Parameter(torch.ones(8, 8)), torch.ones(4, 8), []

def first():
    for _ in range(3):
        with mpamp.autocast("cpu", torch.bfloat16), FlopCounterMode(display=False):
            seen.append(torch.nn.functional.linear(x, weight).dtype)
        with mpamp.autocast("cpu", torch.bfloat16):
            seen.append(torch.nn.functional.linear(x, weight).dtype)

thread = threading.Thread(target=first)
thread.start(); thread.join()
first()
assert seen == [torch.bfloat16] * 12, seen
"""


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.skipif(not HAS_BUILD, reason="the compiled engine isn't built: mpamp build-core")
@pytest.mark.parametrize(
    "program",
    [_EIGHT_THREADS, _COUNTS, _FIRST_IN_A_THREAD],
    ids=["eight threads", "counts", "first region in a thread"],
)
def test_the_compiled_engine_runs(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the build that is there
    environment = {**os.environ, "MPAMP_ENGINE": "compiled", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
