"""Builds of the compiled engine: what is loaded, and what never is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpamp.engine import compiled
from mpamp.engine.compiled import building, store
from mpamp.errors import EngineError

HAS_BUILD = store.note().exists()


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache directory with nothing in it; what was loaded stays loaded for everybody else."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(store, "load", store.load.__wrapped__)


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


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owner here")
def test_a_build_of_somebody_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    put(b"x", "0" * 64)
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    os.chown(store.directory(), 1234, -1) if os.geteuid() == 0 else pytest.skip("needs to give files away")
    with pytest.raises(EngineError, match="belongs to another user"):
        store.load()


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
    monkeypatch.setattr("torch.__version__", "2.99.0")
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
    with pytest.warns(UserWarning, match="the compiled engine is not used"):
        assert compiled.core.__wrapped__() is None


# -- Building ------------------------------------------------------------------------------------------


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(building.importlib.util, "find_spec", lambda name: None)
    found = building.missing()
    assert any("C++ compiler" in clause for clause in found)
    assert any("ninja" in clause for clause in found)
    with pytest.raises(EngineError, match=r"needs a C\+\+ compiler .* and ninja"):
        building.build()
    assert not store.directory().exists()


def test_a_compiler_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "core.cpp:1: error: no such thing")

    put(b"old", "1")
    monkeypatch.setattr(building, "missing", list)
    monkeypatch.setattr(building.subprocess, "run", fail)
    with pytest.raises(EngineError, match="no such thing"):
        building.build(force=True)
    assert (store.library().read_bytes(), store.note().read_text()) == (b"old", "1")
    assert [path.name for path in store.directory().parent.iterdir()] == [store.directory().name]


def test_a_build_is_moved_into_place_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def compile_(folder: Path) -> None:
        made.append(folder)
        (folder / store.library().name).write_bytes(b"new")

    monkeypatch.setattr(building, "missing", list)
    monkeypatch.setattr(building, "_compile", compile_)
    assert building.build() == building.build() == store.library()
    assert len(made) == 1
    assert store.note().read_text() == store.checksum(store.library())
    building.build(force=True)
    assert len(made) == 2
    assert not any(folder.exists() for folder in made)


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
