"""Two processes over gloo: a model with module rules has the same dtypes under DDP and FSDP2 as alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

WORKER = Path(__file__).with_name("rules_worker.py")
FULL, LOW, HALF = "torch.float32", "torch.bfloat16", "torch.float16"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed"),
]

Reports = list[dict[str, Any]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Run the two processes once, and return what each reports."""
    folder = tmp_path_factory.mktemp("ranks")
    paths = [str(WORKER.parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    files = [folder / f"rank{rank}.json" for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(folder / "store"), str(file)],
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


def test_nothing_failed(reports: Reports) -> None:
    assert [report.get("error") for report in reports] == [None, None]


def test_what_the_rules_give_alone(reports: Reports) -> None:
    """What a part gets, what its linear layer gives, and what its softmax does."""
    assert reports[0]["alone"]["seen"] == [
        [FULL, LOW, LOW],
        [FULL, FULL, FULL],  # "fp32" has cast what it gets
        [FULL, HALF, FULL],  # its linear layer has a rule of its own
        [FULL, FULL, FULL],
        [FULL, LOW, LOW],
    ]


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "fsdp2, rules last"])
def test_the_same_dtypes_and_values(name: str, reports: Reports) -> None:
    for report in reports:
        alone, found = report["alone"], report[name]
        assert found["seen"] == alone["seen"]
        assert found["grads"] == alone["grads"] == [FULL]
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert found["norms"] == pytest.approx(alone["norms"], rel=1e-4)


def test_parameters_that_fsdp2_gathers_in_lower_precision(reports: Reports) -> None:
    """It casts what its modules get, too: float32 again in a float32 module; without autocast all runs as it came."""
    for report in reports:
        seen = report["fsdp2, low parameters"]["seen"]
        assert seen[1] == [FULL, FULL, FULL]
        assert seen[2] == [LOW, HALF, FULL]
        assert seen[3] == [LOW, LOW, LOW]
