"""Two processes of one group on this machine, by a worker script that writes what it sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.paths import search_path

__all__ = ["TWO_RANKS", "Reports", "reports_of_two"]

TWO_RANKS = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed"),
]
"""The marks of a module whose tests run two processes."""

Reports = list[dict[str, Any]]
"""What each rank reports."""


def reports_of_two(worker: Path, folder: Path) -> Reports:
    """Run a worker as rank 0 and 1, with a store in ``folder``, and return what each reports."""
    environment = {**os.environ, "PYTHONPATH": search_path(worker.parents[2]), "OMP_NUM_THREADS": "1"}
    files = [folder / f"rank{rank}.json" for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(folder / "store"), str(file)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, file in enumerate(files)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(file.exists() for file in files), "\n".join(outputs)
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]
