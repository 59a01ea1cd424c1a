"""Python processes that one with mpamp's names starts have them too; what they had before goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mpamp
import mpamp.apex
from mpamp import children
from tests.paths import search_path

ROOT = Path(__file__).parents[1]
needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here: nothing is redirected")
LOG = "import builtins\nbuiltins.log = getattr(builtins, 'log', []) + [{0!r}]\n"


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with packages called torch and mpamp that only say that they are imported: what a child pays for."""
    for name, body in (("torch", ""), ("mpamp", "import torch\n"), ("mpamp/apex", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(LOG.format(f"import {name}") + body)
    with open(tmp_path / "mpamp" / "__init__.py", "a") as file:
        file.write(f"def install(**kwargs): log.append('install {{}}'.format(kwargs))\ndef fail(): {'1 / 0'}\n")
    (tmp_path / "mpamp" / "apex" / "__init__.py").write_text(
        "import sys, types\n"
        "def install():\n"
        "    module = types.ModuleType('apex')\n"
        "    module.amp = types.ModuleType('apex.amp')\n"
        "    module.__path__ = []\n"
        "    sys.modules['apex'], sys.modules['apex.amp'] = module, module.amp\n"
        "    log.append('apex')\n"
    )
    return tmp_path


def python(code: str, *paths: Path, calls: Any = None, options: tuple[str, ...] = (), **env: str) -> str:
    """Run code in a child with these on its path, that was told of calls; return what it prints."""
    told = {"calls": {"mpamp:install": {"a": 1}} if calls is None else calls, "root": "nowhere", "prefix": sys.prefix}
    path = os.pathsep.join([children.SITE, *map(str, paths)])
    environment = {**os.environ, "PYTHONPATH": path, children.VARIABLE: json.dumps(told), **env}
    command = [sys.executable, *options, "-c", "import builtins; log = getattr(builtins, 'log', [])\n" + code]
    done = subprocess.run(
        command, cwd=paths[0], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_what_is_announced_is_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(children.VARIABLE, raising=False)
    for before in (None, "/elsewhere", f"/one{os.pathsep}/two", ""):
        if before is None:
            monkeypatch.delenv("PYTHONPATH", raising=False)
        else:
            monkeypatch.setenv("PYTHONPATH", before)
        children.announce("a:b", x=1)
        children.announce("c:d")
        children.announce("a:b", x=2)
        told = json.loads(os.environ[children.VARIABLE])
        assert told["calls"] == {"a:b": {"x": 2}, "c:d": {}}
        assert told["root"] == str(ROOT)
        assert os.environ["PYTHONPATH"] == os.pathsep.join([children.SITE, *([before] if before else [])])
        children.withdraw("a:b")
        children.withdraw("a:b")
        assert json.loads(os.environ[children.VARIABLE])["calls"] == {"c:d": {}}
        children.withdraw("c:d")
        assert children.VARIABLE not in os.environ
        assert os.environ.get("PYTHONPATH", "") == (before or "")


def test_install_announces_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(children.VARIABLE, raising=False)
    with mpamp.install(persistent_cache=True):
        mpamp.apex.install()
        calls = json.loads(os.environ[children.VARIABLE])["calls"]
        assert calls == {"mpamp.standins:install": {"persistent_cache": True}, "mpamp.apex:install": {}}
        mpamp.apex.uninstall()
    assert children.VARIABLE not in os.environ


def test_a_child_without_torch_pays_nothing(packages: Path) -> None:
    code = "import sys; print(log, [m for m in sys.modules if m.startswith(('mpamp', 'torch', 'apex'))])"
    assert python(code, packages).strip() == "[] []"


@pytest.mark.parametrize("first", ["import torch", "import mpamp", "import mpamp, torch", "import torch, mpamp"])
def test_what_is_announced_is_called_once_torch_is_there(packages: Path, first: str) -> None:
    out = python(f"{first}\nprint(sorted(builtins.log))", packages)
    assert out.strip() == "['import mpamp', 'import torch', \"install {'a': 1}\"]"


def test_the_loader_is_left_as_it_was(packages: Path) -> None:
    code = "import torch; print(vars(torch.__loader__).keys(), type(torch.__loader__).__name__, torch.__spec__.name)"
    assert python(code, packages).strip() == "dict_keys(['name', 'path']) SourceFileLoader torch"


def test_apex_is_there_whoever_is_imported_first(packages: Path) -> None:
    calls = {"mpamp.apex:install": {}}
    code = "from apex import amp; import apex, sys; print(apex.amp is amp, 'torch' in sys.modules, apex.__spec__)"
    assert python(code, packages, calls=calls).strip() == "True True None"
    assert python("import torch\n" + code, packages, calls=calls).strip() == "True True None"


def test_an_apex_that_is_not_announced_is_not_there(packages: Path) -> None:
    assert "No module" in python("try: import apex\nexcept ImportError as error: print(error)", packages)


def test_other_customizations_run_too(packages: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text(LOG.format("site"))
    (theirs / "usercustomize.py").write_text(LOG.format("user"))
    code = "import sys, sitecustomize; print(log, sitecustomize.__file__, any('childsite' in p for p in sys.path))"
    out = python(code, theirs, packages).split()
    assert "'site'" in out[0]
    assert out[-2:] == [str(theirs / "sitecustomize.py"), "False"]
    out = python("import torch; print(builtins.log)", theirs, packages)
    assert "site" in out
    assert "install" in out


def test_a_sitecustomize_that_fails_fails_as_without(packages: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("raise ValueError('theirs')")
    out = python("import torch; print(builtins.log)", theirs, packages)
    assert "Error in sitecustomize" in out
    assert "ValueError: theirs" in out
    assert "install" in out


def test_what_fails_in_a_child_is_said_and_torch_is_there(packages: Path) -> None:
    out = python("import torch; print(torch.__name__)", packages, calls={"mpamp:fail": {}, "mpamp:install": {}})
    assert "RuntimeWarning: mpamp: mpamp:fail failed in a child process: ZeroDivisionError" in out
    assert "torch" in out.splitlines()


def test_an_import_of_torch_that_fails_and_then_works(packages: Path) -> None:
    body = LOG.format("import torch") + "import builtins\nif len(builtins.log) < 2: raise RuntimeError('not yet')\n"
    (packages / "torch" / "__init__.py").write_text(body)
    code = "try: import torch\nexcept RuntimeError as error: print(error)\nimport torch; print(builtins.log)"
    out = python(code, packages).splitlines()
    assert out[0] == "not yet"
    assert "install {'a': 1}" in out[1]


def test_a_python_without_mpamp_keeps_its_torch(packages: Path, tmp_path: Path) -> None:
    only_torch = tmp_path / "only"
    only_torch.mkdir()
    (packages / "torch").rename(only_torch / "torch")
    told = json.dumps({"calls": {"mpamp:install": {}}, "root": str(packages), "prefix": "/another"})
    options = ("-S",)  # whoever has mpamp installed in this environment, the child has not
    code = (
        f"import sys; sys.path.insert(0, {children.SITE!r}); import sitecustomize, torch\nprint('mpamp' in sys.modules)"
    )
    out = python(code, only_torch, options=options, **{children.VARIABLE: told})
    assert "mpamp: it isn't installed for this Python" in out
    assert out.splitlines()[0] == "False"
    told = told.replace("/another", sys.base_prefix)  # the same Python, whose parent had mpamp from elsewhere
    out = python(code, only_torch, options=options, **{children.VARIABLE: told})
    assert out.splitlines() == ["True"]


STATE = """
import os, sys, torch
DEVICE = os.environ["STATE_DEVICE"]
def say(how):  # in one piece, beside other processes
    sys.stdout.write(f"{how} {state()}\\n")
def state():
    with torch.autocast(DEVICE, dtype=torch.float16):
        product = torch.ones(2, 2, device=DEVICE) @ torch.ones(2, 2).to(DEVICE)
        told = product.dtype, product.exp().dtype
    scaler = torch.amp.GradScaler(DEVICE)
    try:
        from apex import amp
    except ImportError:
        amp = torch
    is_ours = any("mpamp" in c.__module__ for c in type(scaler).__mro__)
    return str(product.device), str(told), is_ours and scaler.is_enabled(), amp.__name__
"""
SCRIPT = """
import subprocess, sys, torch
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset
from state_of_mpamp import state

class Data(Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, i):
        return state()

def put(rank, queue):
    queue.put(state())

if __name__ == "__main__":
    print("here", state())
    for how in sys.argv[1:]:
        if how == "subprocess":
            code = "from state_of_mpamp import state; print('subprocess', state())"
            subprocess.run([sys.executable, "-c", code], check=True, cwd=sys.path[0])
        elif how == "grandchild":
            code = "from state_of_mpamp import state; print('grandchild', state())"
            code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}], check=True)"
            subprocess.run([sys.executable, "-c", code], check=True, cwd=sys.path[0])
        elif how == "mp.spawn":
            queue = mp.get_context("spawn").SimpleQueue()
            mp.spawn(put, (queue,), nprocs=1)
            print(how, queue.get())
        elif how.startswith("torch."):
            sys.stdout.flush()
            command = [sys.executable, "-m", how, "--nproc-per-node", "2", sys.path[0] + "/state_of_mpamp.py"]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        else:
            data = DataLoader(Data(), batch_size=None, num_workers=1, multiprocessing_context=how)
            print(how, tuple(next(iter(data))))
        sys.stdout.flush()
"""
OURS = "('cpu', '(torch.float16, torch.float32)', True, 'mpamp.apex.amp')"
WAYS = ("forkserver", "mp.spawn", "subprocess", "torch.distributed.run", "torch.distributed.launch")


def run_children(tmp_path: Path, *ways: str, redirects: bool = False, more: tuple[str, ...] = ()) -> list[str]:
    """Run a script that starts processes and says what each finds; its device is "cpu", or "cuda" by --device cpu."""
    (tmp_path / "state_of_mpamp.py").write_text(STATE + "if __name__ == '__main__':\n    say('launched')\n")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    name, options = ("cuda", ("--device", "cpu")) if redirects else ("cpu", ())
    path = search_path(ROOT, tmp_path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "STATE_DEVICE": name}
    command = [sys.executable, "-m", "mpamp", "run", *options, *more, str(script), *ways]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_workers_and_subprocesses(tmp_path: Path) -> None:
    assert run_children(tmp_path, "fork", "spawn") == [f"{how} {OURS}" for how in ("here", "fork", "spawn")]


@needs_no_cuda
@pytest.mark.slow
def test_they_are_redirected_too(tmp_path: Path) -> None:
    ways = ("spawn", "mp.spawn")
    assert run_children(tmp_path, *ways, redirects=True) == [f"{how} {OURS}" for how in ("here", *ways)]


@pytest.mark.sweep
@pytest.mark.parametrize("redirects", [False, pytest.param(True, marks=needs_no_cuda)])
def test_every_way_to_start_a_process(tmp_path: Path, redirects: bool) -> None:
    launched = ["launched", "launched"]
    expected = ["here", "forkserver", "mp.spawn", "subprocess", *launched, *launched]
    assert run_children(tmp_path, *WAYS, redirects=redirects) == [f"{how} {OURS}" for how in expected]


@needs_no_cuda
@pytest.mark.sweep
@pytest.mark.parametrize("options", [["--num_processes=1"], ["--multi_gpu", "--num_processes=2"]])
def test_accelerate_launch(tmp_path: Path, options: list[str]) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "launched.py").write_text(STATE + "say('launched')\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search_path(ROOT), "STATE_DEVICE": "cuda"}
    launch = ["-m", "accelerate.commands.launch", "--mixed_precision=fp16", "--num_machines=1", "--dynamo_backend=no"]
    run = [sys.executable, "-m", "mpamp", "run", "--device", "cpu"]
    command = [*run, *launch, *options, str(tmp_path / "launched.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"launched {OURS}"] * int(options[-1][-1])
