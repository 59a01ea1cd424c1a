"""Regions, ops and scalers: each case has torch's row and mpamp's, and runs what it says."""

from __future__ import annotations

import pytest
import torch

from mpamp.bench.micro import ops, regions, scalers
from mpamp.bench.rows import Row

CPU, BF16 = torch.device("cpu"), torch.bfloat16


def _by_work(rows: list[Row]) -> dict[str, dict[str, Row]]:
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row.work, {})[row.variant] = row
    return found


def test_regions_are_compared_case_by_case_and_those_without_like_with_a_plain_one() -> None:
    rows = _by_work(regions.run(CPU, BF16, 1, is_quick=True))
    assert rows["region: plain"].keys() == rows["region: disabled"].keys() == {"torch.autocast", "mpamp"}
    plain = rows["region: plain"]["torch.autocast"].time
    ours = rows["region: ops={...}"]
    assert ours.keys() == {"mpamp"}
    assert plain is not None
    assert ours["mpamp"].time is not None
    assert ours["mpamp"].ratio == round(ours["mpamp"].time.us / plain.us, 4)


@pytest.mark.python_engine
@pytest.mark.slow
def test_ops_have_the_counts_that_their_situation_says() -> None:
    rows = _by_work(ops.run(CPU, BF16, 1, is_quick=True))
    assert {work.partition(":")[0] for work in rows} >= {"mm", "linear", "softmax.int", "cat", "fft_fft"}
    frozen = rows["linear: frozen weight + bias, no_grad"]
    assert frozen.keys() == {"pure", "torch.autocast", "mpamp", "torch.autocast over mpamp"}
    # What torch casts at each use, mpamp keeps.
    casts = {name: row.counts.weight_casts for name, row in frozen.items() if row.counts is not None}
    assert casts == {"pure": 0, "torch.autocast": 2, "mpamp": 0, "torch.autocast over mpamp": 2}
    assert "mpamp persistent" in rows["linear: persistent cache, no_grad"]


def test_scalers_read_as_often_as_torchs() -> None:
    rows = _by_work(scalers.run(CPU, 1, is_quick=True))
    assert len(rows) == 8
    reads = {}
    for work, pair in rows.items():
        assert pair.keys() == {"torch.amp.GradScaler", "mpamp.GradScaler"}
        reads[work] = [row.counts.host_syncs for row in pair.values() if row.counts is not None]
    assert all(ours <= torchs for torchs, ours in reads.values())
    assert reads["scaler: SGD, foreach; scale, step, update"][0] == 1
