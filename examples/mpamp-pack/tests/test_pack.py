"""The pack's rules: found by entry point, in force on every device, under the user's own."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import mpamp
from mpamp.plugins.manager import manager

BRAIN, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
PLUGIN = "mpamp-pack:ops.pack"


def test_a_region_loads_the_pack_and_importing_mpamp_does_not() -> None:
    code = """
import sys, torch, mpamp
assert "mpamp_pack" not in sys.modules
with mpamp.autocast("cpu"):
    assert torch.ops.mpamp_pack.scores(torch.ones(2, 2), torch.ones(2, 2), 1.0).dtype is torch.bfloat16
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("lower", [BRAIN, HALF])
def test_dtypes(lower: torch.dtype) -> None:
    import mpamp_pack

    x = torch.rand(4, 4)
    with mpamp.autocast("cpu", dtype=lower):
        scores = mpamp_pack.scores(x, x, 0.5)
        assert scores.dtype is lower
        assert mpamp_pack.entropy(scores).dtype is FULL
        assert mpamp_pack.join([scores, x]).dtype is FULL
        assert mpamp_pack.join([scores, scores]).dtype is lower
    assert mpamp_pack.scores(x, x, 0.5).dtype is FULL


def test_gradients() -> None:
    import mpamp_pack

    x = torch.rand(4, 4, requires_grad=True)
    with mpamp.autocast("cpu"):
        loss = mpamp_pack.entropy(mpamp_pack.scores(x, x, 0.5)).sum()
    loss.backward()
    assert x.grad is not None
    assert x.grad.dtype is FULL


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu"])
def test_the_table_says_who_decided(device: str) -> None:
    table = mpamp.get_op_table(device)
    assert {table[f"mpamp_pack::{op}"].source for op in ("scores", "entropy", "join")} == {PLUGIN}
    assert (str(table.policy("logit", HALF)), table["logit"].source) == ("fp32", PLUGIN)
    assert table["mm"].source != PLUGIN
    assert table.policy("logit", BRAIN) == mpamp.OpTable.named("default", device).policy("logit", BRAIN)


def test_the_users_rules_go_on_top() -> None:
    import mpamp_pack

    x = torch.rand(4, 4)
    with mpamp.autocast("cpu", ops={"mpamp_pack::scores": "fp32"}):
        assert mpamp_pack.scores(x, x, 1.0).dtype is FULL
    mpamp.set_op_rules("cpu", {"mpamp_pack::scores": "fallthrough"})
    try:
        with mpamp.autocast("cpu"):
            assert mpamp_pack.scores(x.double(), x.double(), 1.0).dtype is torch.float64
            assert mpamp_pack.scores(x, x, 1.0).dtype is FULL
    finally:
        mpamp.set_op_rules("cpu", None)


def test_the_listing_shows_the_pack() -> None:
    mpamp.get_backend("cpu")
    (info,) = [i for i in manager().listing() if i.distribution == "mpamp-pack"]
    assert (info.name, info.version, info.status) == ("ops.pack", "0.1.0", "loaded")


def test_the_conformance_kit_checks_the_packs_rows() -> None:
    from mpamp.testing import check_backend

    report = check_backend("cpu", sections=["table"]).raise_for_failures()
    assert {c.name for c in report.passed if "mpamp_pack::" in c.name} == {
        "mpamp_pack::scores (lower_precision_fp)",
        "mpamp_pack::entropy (fp32)",
        "mpamp_pack::join (promote)",
    }
