"""torch's ShardedGradScaler under install(): what it finds has a dimension, and is a sum over the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import TWO_RANKS, Reports

WORKER = Path(__file__).with_name("sharded_worker.py")

pytestmark = TWO_RANKS


@pytest.mark.parametrize("way", ["step", "unscale"])
@pytest.mark.parametrize("kind", ["plain", "foreach", "fused"])
def test_all_ranks_skip_together(reports: Reports, way: str, kind: str) -> None:
    for report in reports:
        expected = [False, True, True, False]
        assert report[f"{way}/{kind}"] == {"skipped": expected, "unchanged": expected, "scales": [8.0, 4.0, 2.0, 2.0]}
