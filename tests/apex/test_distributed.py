"""Two processes: every rank has the same masters, bit by bit, and skips the same steps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.paths import search_path

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_ranks_stay_the_same(tmp_path, level):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search_path(ROOT)}
    command = [sys.executable, "-m", "tests.apex.ddp_worker", level, str(tmp_path / "store")]
    workers = [
        subprocess.Popen([*command, str(rank)], stdout=-1, stderr=-1, text=True, cwd=ROOT, env=env) for rank in (0, 1)
    ]
    found = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], found
    first, second = (out.splitlines()[-1] for out, _ in found)  # some Gloos print lines of their own before
    assert first == second
    assert "'loss_scale': 512.0" in first
