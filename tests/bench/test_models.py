"""Every workload runs in every precision, and casts its weights as often as that precision says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mpamp
from mpamp.bench import models
from mpamp.bench.ddp import run as run_ddp
from mpamp.bench.models import Measuring, modes_of, run_workload
from mpamp.bench.precisions import PRECISIONS, precisions_for, use_mpamps_kernels, use_torchs_kernels
from mpamp.bench.rows import Row
from mpamp.bench.sizes import CARD, PROCESSOR, QUICK, sizes_for
from mpamp.bench.workloads import Workload, ddp_workload, workloads
from mpamp.engine import installed

CPU, BF16 = torch.device("cpu"), torch.bfloat16
HOW = Measuring(CPU, BF16, rounds=2, turn_s=0.0, warm_up=0)
NAMES = ("float32", "pure", "torch.autocast", "mpamp", "mpamp persistent", "torch.autocast over mpamp")
WORKS = {each.name: each for each in workloads(QUICK) if not each.is_parallel}
KEPT_SHARE = {"accumulate8-train-1x8": 1 / 8, "gan-train-2": 1 / 2}
"""Of the casts of regions, those that are left where casts are kept between the passes of a step."""


@pytest.fixture(autouse=True)
def torchs_settings() -> Any:
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    mpamp.clear_cache()


def _by_variant(rows: list[Row]) -> dict[str, Row]:
    return {row.variant: row for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKS)
def test_weights_are_cast_as_often_as_the_precision_says(name: str) -> None:
    rows = _by_variant(run_workload(WORKS[name], "eager", HOW))
    assert tuple(rows) == NAMES
    # This processor's oneDNN may have no lower-precision LSTM: torch fails then, mpamp falls back to float32.
    assert {v for v, row in rows.items() if row.status != "ok"} <= {"torch.autocast", NAMES[-1]}
    counts = {variant: row.counts for variant, row in rows.items() if row.counts is not None}
    assert counts["float32"].weight_casts == counts["pure"].weight_casts == 0
    in_regions = counts["mpamp"].weight_casts
    assert in_regions == counts["mpamp"].cache_casts > 0
    kept = 0 if "infer" in name else in_regions * KEPT_SHARE.get(name, 1)
    if name.startswith("lora"):
        kept = sum(weight.requires_grad for weight in WORKS[name].model().parameters())
    # Casts that are kept when the counters come aren't for use under their modes: the cache's own count is the one.
    assert counts["mpamp persistent"].cache_casts == kept
    if rows["torch.autocast"].status == "ok":
        assert counts["torch.autocast"].weight_casts == in_regions
        assert counts["torch.autocast"].cache_casts == 0  # mpamp's kernels were out of the way


def test_ratios_are_computed_from_the_medians() -> None:
    rows = run_workload(WORKS["mlp-infer-2"], "eager", HOW)
    base = _by_variant(rows)["torch.autocast"].time
    assert base is not None
    for row in rows:
        assert row.time is not None
        assert row.ratio == round(row.time.us / base.us, 4)


def test_wanted_precisions_come_with_the_base() -> None:
    how = Measuring(CPU, BF16, rounds=1, turn_s=0.0, precisions=("mpamp",))
    assert [row.variant for row in run_workload(WORKS["mlp-train-2"], "eager", how)] == ["torch.autocast", "mpamp"]


def test_one_that_raises_is_a_row_and_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Float32Only(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.is_autocast_enabled("cpu"):
                raise RuntimeError("no autocast here\nsecond line")
            return super().forward(x)

    work = Workload("fails", "infer", lambda: Float32Only(2, 2), lambda: (torch.ones(1, 2),), WORKS["mlp-infer-2"].job)
    rows = _by_variant(run_workload(work, "eager", HOW))
    assert [rows[v].status for v in ("float32", "pure", "mpamp")] == ["ok", "ok", "failed"]
    assert rows["mpamp"].reason == "RuntimeError: no autocast here"
    assert rows["mpamp"].time is rows["float32"].ratio is None


def test_float16_training_is_scaled_and_pure_float16_is_not() -> None:
    by_name = {p.name: p for p in PRECISIONS}
    for name, enabled in (("pure", False), ("float32", False), ("torch.autocast", True), ("mpamp", True)):
        assert by_name[name].make_scaler(CPU, torch.float16).is_enabled() is enabled
        assert not by_name[name].make_scaler(CPU, BF16).is_enabled()
    assert type(by_name["mpamp"].make_scaler(CPU, torch.float16)) is mpamp.GradScaler


def test_kernels_are_taken_out_and_put_back() -> None:
    use_mpamps_kernels(CPU, BF16)
    before = installed("cpu")
    assert before
    use_torchs_kernels(CPU)
    assert installed("cpu") == []
    use_mpamps_kernels(CPU, BF16)
    assert set(installed("cpu")) <= set(before)
    assert installed("cpu")


def test_tf32_is_only_where_the_device_says_it_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "float32 TF32" not in [p.name for p in precisions_for(CPU, is_compiled=False)]
    monkeypatch.setattr(torch.cpu, "is_tf32_supported", lambda: True, raising=False)
    assert "float32 TF32" in [p.name for p in precisions_for(CPU, is_compiled=False)]
    next(p for p in PRECISIONS if p.has_tf32).prepare(CPU, BF16)
    assert torch.get_float32_matmul_precision() == "high"
    PRECISIONS[0].prepare(CPU, BF16)
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("sizes", [CARD, PROCESSOR, QUICK])
def test_names_are_of_one_workload_each(sizes: Any) -> None:
    names = [each.name for each in workloads(sizes)]
    assert len(names) == len(set(names)) >= 14
    kinds = ("gpt2-infer", "resnet50-infer", "gpt2-train", "resnet50-train", "lora", "linears", "lstm", "mlp", "bert")
    assert all(any(name.startswith(kind) for name in names) for kind in (*kinds, "gan", "accumulate8", "ddp"))


def test_a_processor_gets_the_same_models_with_less_in_a_batch() -> None:
    assert sizes_for(CPU, is_quick=False) is PROCESSOR
    assert (PROCESSOR.gpt, PROCESSOR.bert, PROCESSOR.depths) == (CARD.gpt, CARD.bert, CARD.depths)
    assert PROCESSOR.gpt_train[0] < CARD.gpt_train[0]


def test_only_weights_that_do_not_train_are_frozen() -> None:
    assert modes_of(WORKS["mlp-infer-2"]) == ("eager", "compile", "freezing")
    assert modes_of(WORKS["mlp-train-2"]) == ("eager", "compile")
    assert modes_of(ddp_workload(QUICK)) == ("eager",)


def test_memory_of_other_variants_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "peak_memory", lambda variant, device: 100_000)
    rows = _by_variant(run_workload(WORKS["mlp-infer-2"], "eager", HOW))
    numbers = sum(weight.numel() for weight in WORKS["mlp-infer-2"].model().parameters())
    assert rows["mpamp"].peak_bytes == 100_000 - 2 * numbers  # beside the pure model, in bfloat16
    assert rows["pure"].peak_bytes == 100_000 - 4 * numbers


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["compile", "freezing"])
def test_compiled_code_of_one_precision_serves_no_other(mode: str) -> None:
    how = Measuring(CPU, BF16, rounds=1, turn_s=0.0, precisions=("pure", "mpamp"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    rows = run_workload(WORKS["mlp-infer-2"], mode, how)
    assert [(row.status, row.reason) for row in rows] == [("ok", None)] * 3
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
    assert rows[0].counts is not None
    assert rows[0].counts.kernels is None  # compiled code isn't looked into


@pytest.mark.slow
def test_two_processes_share_a_workload() -> None:
    rows = _by_variant(run_ddp(QUICK, HOW))
    assert tuple(rows) == NAMES
    assert {row.status for row in rows.values()} == {"ok"}
    assert {row.time.rounds for row in rows.values() if row.time is not None} == {2}
    assert rows["mpamp"].counts is not None
    assert rows["mpamp"].counts.weight_casts == 4
