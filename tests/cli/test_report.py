"""``mpamp report``: a script runs as it is, and its report is written however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import mpamp
from mpamp import apex as drop_in
from mpamp.cli.app import app
from mpamp.cli.report import reported

pytest.importorskip("jinja2")
ROOT = Path(__file__).parents[2]
TRAINING = """
import sys
import torch

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.ones(32, 64)).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(sys.argv[1:], __name__, loss.dtype)
"""
APEX = """
import sys
import torch
from apex import amp

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = amp.initialize(model, optimizer, opt_level=sys.argv[1], loss_scale="dynamic", verbosity=0)
for _ in range(4):
    optimizer.zero_grad()
    with amp.scale_loss((model(torch.ones(1, 4)).float() * 2.5).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
amp.shutdown()
"""
PLAIN = "import torch; print(torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype)"


@pytest.fixture(autouse=True)
def _own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put back what a program changes, and what is installed for it."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("RANK", raising=False)
    yield
    drop_in.uninstall()
    mpamp.uninstall()


def run(tmp_path: Path, program: str, *arguments: str, options: tuple[str, ...] = ()) -> tuple[Result, str]:
    """Run a program in this process; return the command's result, and the page."""
    script, out = tmp_path / "script.py", tmp_path / "out.html"
    script.write_text(program)
    result = CliRunner().invoke(app, ["report", "--out", str(out), *options, str(script), *arguments])
    return result, out.read_text(encoding="utf-8")


def test_a_script_runs_as_it_is_and_torchs_regions_are_seen(tmp_path: Path) -> None:
    result, page = run(tmp_path, TRAINING, "--lr", "1", "-h")
    assert result.exit_code == 0, result.output
    assert result.stdout == "['--lr', '1', '-h'] __main__ torch.float32\n"
    assert result.stderr == f"mpamp: the report is in {tmp_path / 'out.html'}\n"
    for words in ("<b>15</b><span>casts in ", "script.py --lr 1 -h", "The script ran to its end", "bfloat16 on cpu"):
        assert words in page
    assert "<b>5</b><span>optimizer steps" in page


def test_a_module_runs_as_python_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, out = tmp_path / "trained", tmp_path / "out.html"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("print(__package__)\n" + TRAINING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "trained", raising=False)
    result = CliRunner().invoke(app, ["report", "--out", str(out), "-m", "trained", "--lr", "1", "-m"])
    assert result.exit_code == 0, result.output
    assert result.stdout == "trained\n['--lr', '1', '-m'] __main__ torch.float32\n"
    page = out.read_text(encoding="utf-8")
    assert "<b>15</b><span>casts in " in page
    assert "-m trained --lr 1 -m" in page


def test_a_script_of_apex_runs_by_mpamps(tmp_path: Path) -> None:
    result, page = run(tmp_path, APEX, "O1")
    assert result.exit_code == 0, result.output
    assert "mpamp.apex.scaler.LossScaler: 4 attempts to step, 2 skipped" in page
    assert "linear in the model itself" in page


def test_a_script_without_a_region_is_told_so(tmp_path: Path) -> None:
    result, page = run(tmp_path, PLAIN)
    assert (result.exit_code, result.stdout) == (0, "torch.float32\n")
    assert "No op ran in a region: everything ran in the dtypes that it was called with" in page


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ("raise SystemExit(3)", 3, "The script exited with 3"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("open('nonesuch')", 1, "FileNotFoundError"),
        ("raise KeyboardInterrupt", 130, "The script was interrupted"),
        ("import sys; sys.exit()", 0, "The script exited with 0"),
    ],
)
def test_the_exit_code_is_the_scripts(tmp_path: Path, ending: str, code: int, words: str) -> None:
    result, page = run(tmp_path, f"{PLAIN}\n{ending}")
    assert result.exit_code == code
    assert words in page
    assert "mpamp/cli" not in page  # the traceback is the script's


def test_wrong_arguments_are_refused_before_anything_runs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise AssertionError")
    for options, error in (
        (("--compare", "float64"), "'float64' is not 'float32'"),
        (("--watch", "-1"), "-1 is not in the range"),
        (("--out", str(tmp_path)), "is a directory"),
    ):
        result = CliRunner().invoke(app, ["report", *options, str(script)])
        assert (result.exit_code, result.stdout) == (2, "")
        assert error in result.stderr
    assert CliRunner().invoke(app, ["report", "nonesuch.py"]).exit_code == 2


def test_each_rank_writes_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with reported(tmp_path / "out.html", "module", ()):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out.rank1.html"]
    monkeypatch.setenv("WORLD_SIZE", "1")
    with reported(tmp_path / "out.html", "module", ()):
        pass
    assert (tmp_path / "out.html").exists()


def test_a_script_that_fails_when_it_is_run_again_is_said_to(tmp_path: Path) -> None:
    program = "import os, sys\nif os.path.exists('was'): sys.exit('there already')\nopen('was', 'w').close()"
    program = program.replace("'was'", repr(str(tmp_path / "was")))
    result, page = run(tmp_path, program, options=("--compare", "float32"))
    assert result.exit_code == 0
    assert "Run again, as it is, it ended with 1: there already" in page


@pytest.mark.slow
def test_it_is_compared_with_float32_by_two_more_runs(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    program = TRAINING + (
        f"\nwith open({str(seen)!r}, 'a') as file, torch.autocast('cpu', torch.bfloat16):"
        "\n    file.write(str(model(torch.ones(1, 64)).dtype) + ' ')"
    )
    result, page = run(tmp_path, program, "x", options=("--compare", "float32"))
    assert result.exit_code == 0, result.output
    assert seen.read_text().split() == ["torch.bfloat16", "torch.bfloat16", "torch.float32"]
    assert result.stdout.count("__main__") == 1
    for words in ("Beside float32", "Time of a step (median)", "Most memory of the process"):
        assert words in page


def test_being_terminated_leaves_a_report(tmp_path: Path) -> None:
    script, out = tmp_path / "script.py", tmp_path / "out.html"
    script.write_text(f"{PLAIN}\nopen('ready', 'w').close()\nimport time\ntime.sleep(100)")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mpamp", "report", "--out", str(out), str(script)]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 100
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143
    finally:
        process.kill()
    assert "The script exited with 143" in out.read_text(encoding="utf-8")
