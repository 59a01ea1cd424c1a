"""What is known of the devices in use."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import mpamp
from mpamp.backends.cpu import CpuBackend
from mpamp.devices import registry
from mpamp.devices.registry import is_capturing


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Yield the answers of a processor that records no graph, one for each time that it is asked how to tell."""
    answers: list[bool] = []

    def capture_check(self: CpuBackend) -> Callable[[], bool]:
        answers.append(False)
        return lambda: answers[-1]

    with mpamp.autocast("cpu"):
        pass
    monkeypatch.setattr(CpuBackend, "capture_check", capture_check)
    registry._capture_check.cache_clear()
    yield answers
    registry._capture_check.cache_clear()


def test_steps_do_not_ask_again_how_a_recording_is_told(asked: list[bool]) -> None:
    layer = torch.nn.Linear(2, 2)
    optimizer, scaler = torch.optim.SGD(layer.parameters()), mpamp.GradScaler("cpu")
    counts = []
    for _ in range(4):
        with mpamp.autocast("cpu", persistent_cache=True):
            loss = layer(torch.ones(1, 2)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        counts.append(len(asked))
    assert counts[1:] == counts[:1] * 3


def test_a_recording_is_told_each_time_of_one_device_and_of_all(asked: list[bool]) -> None:
    assert not is_capturing()
    assert not is_capturing("cpu")
    asked[-1] = True
    assert is_capturing()
    assert is_capturing("cpu")
