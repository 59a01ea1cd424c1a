"""Two processes of one group on this machine, by a worker script that writes what it sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["Reports", "reports_of_two"]

Reports = list[dict[str, Any]]
"""What each rank reports."""


def reports_of_two(worker: Path, folder: Path) -> Reports:
    """Run a worker as rank 0 and 1, with a store in ``folder``, and return what each reports."""
    paths = [str(worker.parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
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
