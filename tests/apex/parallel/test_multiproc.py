"""``python -m apex.parallel.multiproc``: one process for each rank, its exit code, and what it tells them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from mpamp.apex.parallel import multiproc
from tests import processes
from tests.paths import search_path

ROOT = Path(__file__).parents[3]
SCRIPT = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
print(json.dumps([sys.argv[1:], [os.environ[name] for name in names], "MASTER_PORT" in os.environ]))
sys.exit(3 if "--fail" in sys.argv and os.environ["RANK"] == "1" else 0)
"""
RUN = "import mpamp.apex, runpy, sys; mpamp.apex.install(); sys.argv.pop(0); "
RUN += "runpy.run_module('apex.parallel.multiproc', run_name='__main__', alter_sys=True)"
pytestmark = pytest.mark.skipif(torch.accelerator.device_count() > 0, reason="one process for each accelerator here")


def run(folder, *arguments):
    script = folder / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": search_path(ROOT)}
    return processes.python("-c", RUN, "multiproc", str(script), *arguments, cwd=folder, env=environment)


def test_processes_are_told_who_they_are(tmp_path):
    done = run(tmp_path, "--world-size", "2", "--lr", "1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["--world-size", "2", "--lr", "1", "--rank", "0"], ["0", "2", "0"], True]
    log = json.loads((tmp_path / "GPU_1.log").read_text())
    assert log == [["--world-size", "2", "--lr", "1", "--rank", "1"], ["1", "2", "1"], True]


def test_the_exit_code_is_that_of_a_process_that_failed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    assert multiproc.main(["script.py", "--rank", "7", "--fail", "--world-size", "2"]) == 3
    arguments, _, _ = json.loads((tmp_path / "GPU_1.log").read_text())
    assert arguments == ["--rank", "1", "--fail", "--world-size", "2"]
