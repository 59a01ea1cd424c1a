"""Two gloo processes: masters are the same bit by bit, training goes as in float32, batch norm is the joint batch's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import TWO_RANKS

pytestmark = TWO_RANKS

WORKER = Path(__file__).parents[1] / "two_ranks.py"
TRAINED = ["O0", "O2", "O2 delayed", "O2 float32", "O4", "O5"]


def close_to_float32(losses, alone):
    assert losses == pytest.approx(alone, rel=0.1, abs=0.02)
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("name", TRAINED)
def test_larc_and_masters_hold_across_ranks(reports, name):
    first, second = (report["trained"][name] for report in reports)
    assert first["masters"] == second["masters"]
    assert first["skipped"] == second["skipped"] == [step == 3 for step in range(12)]
    assert first["losses"] == second["losses"]
    low = {"O2": "torch.float16", "O5": "torch.bfloat16"}.get(name.split()[0])
    assert first["dtypes"] == sorted({"torch.float32"} | ({low} if low else set()))


@pytest.mark.parametrize("name", TRAINED)
def test_training_goes_as_in_float32_on_the_joint_batch(reports, name):
    close_to_float32(reports[0]["trained"][name]["losses"], reports[0]["alone"])


def test_fp16_optimizer_trains_as_float32(reports):
    first, second = (report["fp16"] for report in reports)
    assert first["masters"] == second["masters"]
    close_to_float32(first["losses"], reports[0]["alone without norm"])
    assert first["scale"] == second["scale"] == 512.0


def test_sync_batch_norm_is_batch_norm_of_the_joint_batch(reports):
    for report in reports:
        assert len(report["batch norm"]) == 7
        assert max(report["batch norm"].values()) < 1e-9


def test_sync_batch_norm_of_lower_precision(reports):
    for rank, report in enumerate(reports):
        found = report["half batch norm"]
        assert found["dtype"] == "torch.bfloat16"
        assert found["values"] == pytest.approx([1.0 if rank else -1.0] * 3)
        assert found["mean"] == pytest.approx([0.3] * 3)


def test_arguments_of_data_parallelism(reports):
    for rank, report in enumerate(reports):
        wanted = dict.fromkeys(report["arguments"], 2.0)
        wanted |= {"sum": 4.0, "delayed sum": 4.0, "split factor": 1.0, "alone": 1.0 + 2 * rank}
        assert report["arguments"] == wanted


def test_reduction_is_turned_off_and_on(reports):
    assert [report["accumulation"] for report in reports] == [[[1.0, 4.0]] * 2, [[3.0, 4.0]] * 2]


def test_delayed_reduction_takes_any_call(reports):
    assert reports[0]["delayed"] == reports[1]["delayed"] == [4.5, 1.5, True]


def test_reducer_and_flat_calls(reports):
    first, second = (report["reducer"] for report in reports)
    assert first == second
    assert first["grads"] == [2.0]
    assert first["list"] == [[1.5, 1.5], [1.0]]
    assert first["sent"] == [5.0, 5.0]
    assert len(first["masters"]) == 4 * 16 + 16 + 16 + 1


def test_process_groups(reports):
    for report in reports:
        assert report["groups"]["sizes"] == [1, 2]
        assert "groups of 3" in report["groups"]["refused"]
