"""Scale events in loggers: what is logged, when, and that nothing is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mpamp
from mpamp.integrations.logging import log_scale_events
from mpamp.plugins.manager import manager
from mpamp.scaler.history import StepResult


class Rig:
    """A weight, its optimizer, and steps of a scaler."""

    def __init__(self, **options: Any) -> None:
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1, **options)

    def step(self, scaler: mpamp.GradScaler, factor: float = 1.0) -> None:
        self.optimizer.zero_grad()
        scaler.scale((self.weight * factor).sum()).backward()
        scaler.step(self.optimizer)


def listeners() -> int:
    return len(manager().implementations("mpamp_scale_event"))


def test_each_step_is_logged_with_its_scale() -> None:
    scaler, rig, logged = mpamp.GradScaler("cpu", init_scale=8.0), Rig(), []
    before = listeners()
    with log_scale_events(lambda *line: logged.append(line)):
        assert listeners() == before + 1
        for factor in (1.0, float("inf"), 1.0):
            rig.step(scaler, factor)
            scaler.update()
    assert listeners() == before
    rig.step(scaler)
    assert logged == [
        ("amp/scale", 8.0, 1),
        ("amp/skipped", 0, 1),
        ("amp/scale", 8.0, 2),
        ("amp/skipped", 1, 2),
        ("amp/scale", 4.0, 3),
        ("amp/skipped", 0, 3),
    ]


def test_names_steps_and_optimizers_can_be_chosen() -> None:
    scaler, (one, two, other), logged = mpamp.GradScaler("cpu", init_scale=8.0), (Rig(), Rig(), Rig()), []
    named = {"one": one.optimizer, "two": two.optimizer}
    log = log_scale_events(lambda *line: logged.append(line), prefix="", optimizers=named, step=lambda: 41)
    one.step(scaler)
    two.step(scaler, float("inf"))
    other.step(scaler)
    log.close()
    log.close()
    assert logged == [("scale/one", 8.0, 41), ("skipped/one", 0, 41), ("scale/two", 8.0, 41), ("skipped/two", 1, 41)]


def test_two_logs_are_told_and_closed_by_themselves() -> None:
    scaler, rig = mpamp.GradScaler("cpu"), Rig()
    first: list[Any] = []
    second: list[Any] = []
    with log_scale_events(lambda *line: first.append(line)):
        with log_scale_events(lambda *line: second.append(line)):
            rig.step(scaler)
            scaler.update()
        rig.step(scaler)
    assert (len(first), len(second)) == (4, 2)


def test_it_is_closed_by_an_exception_too() -> None:
    before = listeners()
    with pytest.raises(ZeroDivisionError), log_scale_events(print):
        _ = 1 / 0
    assert listeners() == before


def test_what_a_logger_raises_is_one_warning_and_training_goes_on() -> None:
    def fail(name: str, value: float, step: int) -> None:
        raise OSError("disk full")

    scaler, rig = mpamp.GradScaler("cpu"), Rig()
    with log_scale_events(fail):
        with pytest.warns(mpamp.MpampWarning, match="disk full"):
            rig.step(scaler)
        scaler.update()
        before = rig.weight.detach().clone()
        rig.step(scaler)
    assert not torch.equal(rig.weight, before)


def test_nothing_is_read_for_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that the host doesn't know, as of a fused optimizer on an accelerator, is logged when it is asked."""
    logged: list[Any] = []
    monkeypatch.setattr("mpamp.scaler.kernels.is_on_host", lambda value: False)
    scaler, rig = mpamp.GradScaler("cpu", init_scale=8.0, max_consecutive_skips=None), Rig(fused=True)
    with log_scale_events(lambda *line: logged.append(line)):
        rig.step(scaler)
        result = scaler.last_step(rig.optimizer)
        assert isinstance(result, StepResult)
        assert (logged, result.is_read) == ([], False)
        assert not scaler.last_step_skipped(rig.optimizer)
    assert logged == [("amp/scale", 8.0, 1), ("amp/skipped", 0, 1)]


def test_tensorboard_has_the_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    scaler, rig = mpamp.GradScaler("cpu", init_scale=8.0), Rig()
    with SummaryWriter(str(tmp_path)) as writer, log_scale_events(writer):
        for factor in (1.0, float("inf"), 1.0):
            rig.step(scaler, factor)
            scaler.update()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("amp/scale")] == [(1, 8.0), (2, 8.0), (3, 4.0)]
    assert [e.value for e in events.Scalars("amp/skipped")] == [0.0, 1.0, 0.0]
