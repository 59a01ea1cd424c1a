"""Programs are run as Python runs them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import mpamp
import mpamp.apex
from mpamp.cli.app import app
from mpamp.cli.running import run_script
from tests import processes

ROOT = Path(__file__).parents[2]
PROGRAM = """
import atexit, pickle, sys, threading
from beside import NAME

class Own:
    pass

def at_exit():
    print("exit", type(pickle.loads(pickle.dumps(Own()))) is Own)

atexit.register(at_exit)
print(__name__, NAME, sys.argv[1:], sys.modules["__main__"].Own is Own, bool(__builtins__), __doc__)
"""


@pytest.fixture(autouse=True)
def _own_process(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    mpamp.uninstall()
    mpamp.apex.uninstall()


@pytest.fixture
def program(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "beside.py").write_text("NAME = 'found'")
    script = tmp_path / "package" / "__main__.py"
    script.write_text(PROGRAM)
    (tmp_path / "package" / "beside.py").write_text("NAME = 'in the package'")
    return script


def mpamp_run(*arguments, cwd, **env):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env}
    return processes.python("-m", "mpamp", "run", *map(str, arguments), env=environment, cwd=cwd)


def test_a_script_has_its_arguments_its_folder_and_main_until_the_end(program, tmp_path):
    done = mpamp_run(program, "--device", "mine", "-x", "--", "-m", cwd=tmp_path)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "__main__ in the package ['--device', 'mine', '-x', '--', '-m'] True True None",
        "exit True",
    ]


def test_a_module_has_them_too_and_the_current_folder(program, tmp_path):
    done = mpamp_run("--persistent-cache", "-m", "package", "--device", "mine", "-h", cwd=tmp_path)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["__main__ found ['--device', 'mine', '-h'] True True None", "exit True"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_a_program_that_dies_without_cuda_is_told_of_the_option(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import torch\ntorch.zeros(1).cuda()\nprint('done')")
    done = mpamp_run(script, cwd=tmp_path)
    assert done.returncode == 1
    *_, error, advice = done.stderr.splitlines()
    assert error.startswith("RuntimeError" if torch.version.cuda else "AssertionError")  # as torch was built
    assert "`mpamp run --device cpu`" in advice
    done = mpamp_run("--device", "cpu", script, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_one_that_exits_saying_so_is_told_too(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nsys.exit('no CUDA device found' if sys.argv[1:] else 'no such file')")
    result = CliRunner().invoke(app, ["run", str(script), "x"])
    assert result.exit_code == 1
    assert "`mpamp run --device cpu`" in result.stderr
    assert "no CUDA device found" in result.output
    assert "--device" not in CliRunner().invoke(app, ["run", str(script)]).output


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("raise EOFError('no more')", 1, "EOFError: no more"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("open('nonesuch')", 1, "FileNotFoundError"),
        ("import click; raise click.ClickException('mine')", 1, "ClickException: mine"),
        ("1 / 0", 1, "ZeroDivisionError"),
    ],
)
def test_a_program_ends_as_under_python(tmp_path, capsys, body, code, words):
    script = tmp_path / "script.py"
    script.write_text(body)
    if words == "ZeroDivisionError":
        with pytest.raises(ZeroDivisionError):
            run_script(script)
        return
    with pytest.raises(SystemExit) as ended:
        run_script(script)
    assert ended.value.code == code
    assert words in capsys.readouterr().err


def test_relative_imports_and_packages_of_a_module(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "mpamp_test_package"
    package.mkdir()
    (package / "__init__.py").write_text("VALUE = 7")
    (package / "tool.py").write_text("from . import VALUE\nprint(VALUE, __package__, __spec__.name, __name__)")
    run_script("mpamp_test_package.tool", ["a"])
    assert capsys.readouterr().out.split() == ["7", "mpamp_test_package", "mpamp_test_package.tool", "__main__"]
    assert sys.argv == [str(package / "tool.py"), "a"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-m", "nonesuch.module"], 1, "can't find module 'nonesuch.module'"),
        (["-m", "nonesuch"], 1, "no module named 'nonesuch'"),
        (["-m", "xml"], 1, "no module named 'xml' that can be run"),
        (["-m"], 2, "requires an argument"),
        (["--devcie", "cpu", "x.py"], 2, "No such option '--devcie'"),
        (["--ops", "nonesuch.toml", "x.py"], 2, "does not exist"),
    ],
)
def test_what_can_not_be_run_is_said(arguments, code, words):
    result = CliRunner().invoke(app, ["run", *arguments])
    assert result.exit_code == code
    assert words in result.output
