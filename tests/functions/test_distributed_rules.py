"""Two processes over gloo: a model with module rules has the same dtypes under DDP and FSDP2 as alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import TWO_RANKS, Reports

WORKER = Path(__file__).with_name("rules_worker.py")
FULL, LOW, HALF = "torch.float32", "torch.bfloat16", "torch.float16"

pytestmark = TWO_RANKS


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
