"""Ignite's supervised steps and engines with mpamp's region and scaler, on the device that is asked for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mpamp
from mpamp.testing import WeightCastCounter
from tests.integrations.steps import BF16, F16, F32, TOLERANCE, Net, batches, needs, sgd, weights_of

needs("ignite.engine")
import ignite.engine  # noqa: E402
from ignite.engine import DeterministicEngine, Engine, Events  # noqa: E402
from ignite.handlers import Checkpoint, DiskSaver  # noqa: E402
from ignite.metrics import Accuracy  # noqa: E402

from mpamp.integrations import ignite as ours  # noqa: E402

LOSS = torch.nn.functional.cross_entropy


def run(net: Net, count: int = 12, epochs: int = 1, optimizer: Any = None, **options: Any) -> tuple[Engine, Any]:
    optimizer = sgd(net) if optimizer is None else optimizer
    engine = ours.create_supervised_trainer(net, optimizer, LOSS, "cpu", **options)
    engine.run(list(batches(count)), max_epochs=epochs)
    return engine, optimizer


@pytest.mark.parametrize("name", ["supervised_training_step_amp", "supervised_evaluation_step_amp"])
def test_steps_take_ignites_arguments_in_its_order(name: str) -> None:
    mine = [p for p in inspect.signature(getattr(ours, name)).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    theirs = list(inspect.signature(getattr(ignite.engine, name)).parameters.values())
    assert [p.name for p in mine] == [p.name for p in theirs]
    simple = (str, int, bool, type(None))
    assert [p.default for p in mine if isinstance(p.default, simple)] == [
        p.default for p in theirs if isinstance(p.default, simple)
    ]


@pytest.mark.parametrize("name", ["create_supervised_trainer", "create_supervised_evaluator"])
def test_engines_take_every_argument_of_ignites(name: str) -> None:
    made: Callable[..., Any] = getattr(ours, name)
    step = ours.supervised_training_step_amp if "trainer" in name else ours.supervised_evaluation_step_amp
    known = {*inspect.signature(made).parameters, *inspect.signature(step).parameters}
    assert set(inspect.signature(getattr(ignite.engine, name)).parameters) <= known


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_losses_are_float32s(dtype: torch.dtype) -> None:
    plain, net = Net(), Net()
    reference = ignite.engine.create_supervised_trainer(plain, sgd(plain), LOSS, "cpu")
    reference.run(list(batches(12)), max_epochs=2)
    scaler = mpamp.GradScaler("cpu", init_scale=2.0**10) if dtype is F16 else None
    with WeightCastCounter(net) as casts:
        engine, _ = run(net, epochs=2, dtype=dtype, scaler=scaler)
    assert engine.state.output == pytest.approx(reference.state.output, rel=TOLERANCE[dtype])
    assert net.seen == [dtype] * 24
    assert casts.count == 4 * 24
    if scaler is not None:
        assert [record.skipped for record in scaler.history] == [False] * 24


def test_the_loss_is_in_the_region_and_its_rules_hold() -> None:
    net, seen = Net(), []

    def loss_fn(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append((prediction.dtype, (prediction @ prediction.mT).dtype))
        return LOSS(prediction, target)

    step = ours.supervised_training_step_amp(net, sgd(net), loss_fn, "cpu", dtype=BF16, ops={"linear": "fp32"})
    Engine(step).run(list(batches(1)))
    assert seen == [(F32, BF16)]


def test_without_a_device_the_region_is_for_the_models() -> None:
    net = Net()
    Engine(ours.supervised_training_step_amp(net, sgd(net), LOSS)).run(list(batches(1)))
    assert net.seen == [BF16]


def test_a_scaler_on_request() -> None:
    engine, optimizer = run(Net(), 1, dtype=F16, scaler=True)
    assert isinstance(engine.state.scaler, mpamp.GradScaler)
    assert engine.state.scaler.last_step(optimizer) is not None
    assert not hasattr(run(Net(), 1)[0].state, "scaler")
    given = mpamp.GradScaler("cpu", init_scale=2.0)
    run(Net(), 3, dtype=F16, scaler=given)
    assert [record.scale for record in given.history] == [2.0] * 3


@pytest.mark.parametrize("scaled", [False, True])
def test_accumulation_and_clipping_are_float32s(scaled: bool) -> None:
    net, plain = Net(), Net()
    scaler = mpamp.GradScaler("cpu", init_scale=2.0**8) if scaled else None
    run(net, 8, dtype=F16, scaler=scaler, gradient_accumulation_steps=4, max_grad_norm=0.05)
    optimizer = sgd(plain)
    parts = list(batches(8))
    for four in (parts[:4], parts[4:]):
        optimizer.zero_grad()
        for images, labels in four:
            (LOSS(plain(images), labels) / 4).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        optimizer.step()
    torch.testing.assert_close(weights_of(net), weights_of(plain), rtol=0, atol=1e-3)
    assert 0.01 < (weights_of(net) - weights_of(Net())).norm() < 0.05
    assert scaler is None or len(scaler.history) == 2


def test_the_output_is_of_the_whole_loss() -> None:
    losses = [run(Net(), 1, dtype=BF16, gradient_accumulation_steps=n)[0].state.output for n in (1, 3)]
    assert losses[0] == losses[1]


def test_an_overflow_skips_the_step() -> None:
    net = Net()
    before, scaler = weights_of(net), mpamp.GradScaler("cpu", init_scale=8.0)
    step = ours.supervised_training_step_amp(
        net, sgd(net), lambda p, t: LOSS(p, t) * float("inf"), "cpu", scaler=scaler, dtype=F16
    )
    Engine(step).run(list(batches(1)))
    assert torch.equal(weights_of(net), before)
    assert scaler.get_scale() == 4.0


def test_evaluation_is_in_the_region_without_gradients() -> None:
    net = Net()
    engine = ours.create_supervised_evaluator(net, {"accuracy": Accuracy()}, "cpu", dtype=F16)
    state = engine.run(list(batches(3)))
    prediction, target = state.output
    assert (prediction.dtype, prediction.requires_grad, net.training) == (F16, False, False)
    assert target.shape == (32,)
    assert 0 <= state.metrics["accuracy"] <= 1
    assert net.seen == [F16] * 3


def test_resuming_is_exact(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 5}
    whole = Net()
    run(whole, 6, epochs=2, dtype=F16, scaler=mpamp.GradScaler("cpu", **settings))

    def parts(scaler: mpamp.GradScaler) -> tuple[Net, dict[str, Any], Engine]:
        net = Net()
        optimizer = sgd(net)
        engine = ours.create_supervised_trainer(net, optimizer, LOSS, "cpu", dtype=F16, scaler=scaler)
        return net, {"net": net, "optimizer": optimizer, "scaler": scaler, "engine": engine}, engine

    _, saved, engine = parts(mpamp.GradScaler("cpu", **settings))
    saver = Checkpoint(saved, DiskSaver(str(tmp_path), require_empty=False))
    engine.add_event_handler(Events.EPOCH_COMPLETED, saver)
    engine.run(list(batches(6)), max_epochs=1)
    net, loaded, engine = parts(mpamp.GradScaler("cpu"))
    Checkpoint.load_objects(loaded, torch.load(next(tmp_path.glob("*.pt"))))
    engine.run(list(batches(6)), max_epochs=2)
    assert len(net.seen) == 6
    assert torch.equal(weights_of(net), weights_of(whole))
    assert loaded["scaler"].get_scale() == 2.0**12


def test_wrong_arguments_are_refused() -> None:
    net = Net()
    with pytest.raises(ValueError, match="must be 1"):
        ours.supervised_training_step_amp(net, sgd(net), LOSS, gradient_accumulation_steps=0)
    for mode in ("apex", None):
        with pytest.raises(ValueError, match=r"amp_mode is 'amp' here, got .* ignite\.engine has"):
            ours.create_supervised_trainer(net, sgd(net), LOSS, amp_mode=mode)
        with pytest.raises(ValueError, match="amp_mode is 'amp' here"):
            ours.create_supervised_evaluator(net, amp_mode=mode)


def test_engines_may_be_deterministic() -> None:
    net = Net()
    engine = ours.create_supervised_trainer(net, sgd(net), LOSS, deterministic=True)
    assert type(engine) is DeterministicEngine
