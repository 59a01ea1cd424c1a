"""A fork of the process that has imported torch runs a program as a process of its own would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import processes

REPORT = """
import json, os, sys, warnings
found = dict(argv=sys.argv, name=__name__, path=sys.path, cwd=os.getcwd(), options=sys.warnoptions)
found["stdin"] = sys.stdin.read()
found["mpamp"] = [name for name in sys.modules if name.partition(".")[0] in ("mpamp", "tests", "_pytest")]
found["torch"] = sys.modules["torch"].__file__ if "torch" in sys.modules else None
found["main"] = sys.modules["__main__"].__dict__ is globals()
found["env"] = os.environ.get("MARK")
"""


def both(*arguments: str, **options: object) -> list[subprocess.CompletedProcess[str]]:
    """Run a program in a process of its own, and in a fork."""
    command = [sys.executable, *arguments]
    alone = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, **options)  # type: ignore[call-overload]
    return [alone, processes.python(*arguments, **options)]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["-c", "-m", "script"])
def test_a_program_finds_what_it_finds_alone(kind: str, tmp_path: Path) -> None:
    code = REPORT + "import torch\nprint(json.dumps(found))"
    (tmp_path / "program.py").write_text(code)
    start = {"-c": ["-c", code], "-m": ["-m", "program"], "script": [str(tmp_path / "program.py")]}[kind]
    env = {**os.environ, "MARK": "yes", "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[1]}"}
    env.pop("PYTHONWARNINGS", None)
    alone, fork = both("-W", "ignore", *start, "-x", env=env, cwd=tmp_path)
    assert (alone.returncode, alone.stderr) == (fork.returncode, fork.stderr) == (0, "")
    expected, found = json.loads(alone.stdout), json.loads(fork.stdout)
    assert expected.pop("torch") is None
    assert found.pop("torch") is not None
    assert found == expected


@pytest.mark.parametrize(
    ("code", "exit_code"), [("import sys; sys.exit(3)", 3), ("1 / 0", 1), ("import os; os.kill(os.getpid(), 15)", -15)]
)
def test_it_ends_as_it_does_alone(code: str, exit_code: int) -> None:
    code = f"import atexit, sys; print('begun', flush=True); atexit.register(print, 'ended')\n{code}"
    alone, fork = both("-c", code)
    assert (alone.returncode, alone.stdout) == (fork.returncode, fork.stdout)
    assert fork.returncode == exit_code
    assert alone.stderr.splitlines()[-1:] == fork.stderr.splitlines()[-1:]


def test_warnings_are_errors_where_they_are_to_be() -> None:
    done = processes.python("-W", "error", "-c", "import warnings; warnings.warn('a fault')")
    assert done.returncode == 1
    assert done.stderr.endswith("UserWarning: a fault\n")


def test_one_does_not_see_what_another_left() -> None:
    processes.python("-c", "import os, sys, torch; os.environ['MARK'] = 'x'; torch.mark = sys.mark = 1")
    done = processes.python("-c", "import os, sys, torch; print('MARK' in os.environ, hasattr(torch, 'mark'))")
    assert done.stdout == "False False\n"


def test_one_that_hangs_is_killed_and_others_go_on() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        processes.python("-c", "import time; time.sleep(60)", timeout=0.2)
    assert processes.python("-c", "print(1)").stdout == "1\n"
