"""What is measured grows as it is told to; its times are not tested."""

from __future__ import annotations

import pytest
import torch

import mpamp
from mpamp.bench import growth

CPU, BF16 = torch.device("cpu"), torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("subject", growth.SUBJECTS)
def test_each_subject_is_measured_from_few_to_many(subject: str) -> None:
    found = growth.run(subject, CPU, BF16, rounds=1, is_quick=True)
    assert [point.n for point in found.points] == [1, 4, 16]
    assert all(point.us > 0 and point.device_bytes is None for point in found.points)
    assert found.time.constant == pytest.approx(found.points[0].us, abs=0.01)
    assert found.memory.constant == found.points[0].bytes
    assert mpamp.get_op_table("cpu").get("aten::abs") == mpamp.get_op_table("cpu", "default").get("aten::abs")


@pytest.mark.parametrize("make", [growth.parameters, growth.optimizers])
def test_training_casts_each_weight(make: growth.Make) -> None:
    work = make(5, CPU, BF16)
    work()
    before = mpamp.cache_info()
    work()
    assert mpamp.cache_info().casts - before.casts == 5


@pytest.mark.parametrize("n", [1, 300])
def test_rules_are_as_many_as_asked_for(n: int) -> None:
    names = growth.names_of_ops(n)
    assert len(set(names)) == n
    assert len(mpamp.OpTable(dict.fromkeys(names, "fp32"))) == n


def test_asking_for_more_ops_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="ops that a rule can name, not 100000"):
        growth.names_of_ops(100_000)


def test_memory_is_the_same_after_many_regions() -> None:
    found = growth.memory_over_regions(CPU, BF16, few=1000, many=3000)
    assert found["regions"] == [1000, 3000]
    assert found["is_equal"], found


def test_memory_that_regions_leave_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bytes] = []
    monkeypatch.setattr(growth, "use_regions", lambda n, *_: kept.extend(bytes(100) for _ in range(n)))
    found = growth.memory_over_regions(CPU, BF16, few=10, many=100)
    assert not found["is_equal"]
    assert found["bytes_per_region"] > 100
