"""mpamp in Accelerate."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpamp
from mpamp.testing.counting import KernelCounter, WeightCastCounter

from .digits import batches, loss_of, make_model, train_by_hand, weights_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    accelerate = pytest.importorskip(
        "accelerate", reason="accelerate is not installed: pip install 'mpamp[accelerate]'"
    )
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import AutocastKwargs, GradScalerKwargs

    from mpamp.integrations.accelerate import Accelerator

STEPS = 4
PARAMETERS = 4
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BOTH = pytest.mark.parametrize("precision", DTYPES)


@pytest.fixture(autouse=True)
def _forget_the_process_state() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def _sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)


def _set_up(precision: str, make_optimizer: Any = _sgd, **options: Any) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(mixed_precision=precision, cpu=True, **options)
    model = make_model()
    return (accelerator, *accelerator.prepare(model, make_optimizer(model)))


def _train(
    accelerator: Any, model: Any, optimizer: Any, steps: int = STEPS, before_step: Callable[[], object] = lambda: None
) -> None:
    for batch in batches(steps):
        accelerator.backward(loss_of(model, batch))
        before_step()
        optimizer.step()
        optimizer.zero_grad()


def _loss_of_float32_outputs(model: nn.Module, batch: Any) -> torch.Tensor:
    output = model(batch[0]).float()
    with mpamp.autocast("cpu", enabled=False):
        return nn.functional.cross_entropy(output, batch[1])


def _by_hand(precision: str, make_optimizer: Any = _sgd, steps: int = STEPS, **options: Any) -> dict[str, torch.Tensor]:
    model = make_model()
    scaler = mpamp.GradScaler("cpu") if precision == "fp16" else None
    options = {"scaler": scaler, "compute_loss": _loss_of_float32_outputs, **options}
    train_by_hand(model, make_optimizer(model), DTYPES[precision], steps, **options)
    return weights_of(model)


def _assert_equal(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    for name, weight in weights_of(model).items():
        assert torch.equal(weight, weights[name]), name


# -- Training ------------------------------------------------------------------------------------------


@BOTH
def test_training_is_the_loops_by_hand(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", None)  # it would be called where a region of torch's was left
    accelerator, model, optimizer = _set_up(precision)
    with WeightCastCounter(model) as casts:
        _train(accelerator, model, optimizer)
    _assert_equal(model, _by_hand(precision))
    assert casts.count == STEPS * PARAMETERS
    if precision == "fp16":
        assert isinstance(accelerator.scaler, mpamp.GradScaler)
        assert len(accelerator.scaler.history) == STEPS
    else:
        assert accelerator.scaler is None


def test_without_mixed_precision_nothing_is_cast() -> None:
    accelerator, model, optimizer = _set_up("no")
    with WeightCastCounter(model) as casts:
        _train(accelerator, model, optimizer)
    assert casts.count == 0
    assert accelerator.scaler is None
    with accelerator.autocast():
        assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype is torch.float32


def test_rules_hold_in_the_model_and_in_its_own_regions() -> None:
    accelerator, model, optimizer = _set_up("bf16", ops={"linear": "fp32"})
    seen = []
    model[0].register_forward_hook(lambda _, args, output: seen.append(output.dtype))
    _train(accelerator, model, optimizer, 1)
    assert seen == [torch.float32]
    with accelerator.autocast():
        assert nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32
        assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype is torch.bfloat16


def test_a_handler_switches_a_region_off() -> None:
    accelerator, model, _ = _set_up("bf16")
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype is torch.float32
    AcceleratorState._reset_state(True)
    accelerator, model, _ = _set_up("bf16", kwargs_handlers=[AutocastKwargs(cache_enabled=False)])
    with WeightCastCounter(model) as casts, accelerator.autocast():
        model(torch.ones(1, 64))
        model(torch.ones(1, 64))
    assert casts.count == 2 * PARAMETERS


def test_the_model_returns_float32_and_can_be_unwrapped() -> None:
    accelerator, model, _ = _set_up("fp16")
    assert model(torch.ones(1, 64)).dtype is torch.float32
    assert accelerator.prepare(model) is model
    unwrapped = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    with WeightCastCounter(unwrapped) as casts:
        unwrapped(torch.ones(1, 64))
    assert casts.count == 0
    pickle.loads(pickle.dumps(unwrapped))


def test_accumulation_is_one_step_and_one_cast() -> None:
    options = {"gradient_accumulation_steps": 2, "persistent_cache": True}
    accelerator, model, optimizer = _set_up("fp16", **options)
    with WeightCastCounter(model) as casts:
        for batch in batches(2 * STEPS):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
    _assert_equal(model, _by_hand("fp16", every=2))
    assert len(accelerator.scaler.history) == STEPS
    assert casts.count == PARAMETERS * STEPS


@pytest.mark.parametrize("is_fused", [False, True])
def test_clipped_gradients_are_unscaled_and_may_be_clipped_twice(is_fused: bool) -> None:
    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return _sgd(model, fused=is_fused)

    accelerator, model, optimizer = _set_up("fp16", make_optimizer)
    norms = []

    def clip() -> None:
        accelerator.clip_grad_value_(model.parameters(), 0.01)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.05).item())

    def clip_by_hand(parameters: Any) -> None:
        parameters = list(parameters)
        nn.utils.clip_grad_value_(parameters, 0.01)
        nn.utils.clip_grad_norm_(parameters, 0.05)

    _train(accelerator, model, optimizer, before_step=clip)
    _assert_equal(model, _by_hand("fp16", make_optimizer, clip=clip_by_hand))
    assert all(0.05 < norm < 1 for norm in norms)


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_skipped_step_is_known_and_holds_the_schedule_back(is_fused: bool) -> None:
    accelerator, model, optimizer = _set_up("fp16", lambda model: _sgd(model, fused=is_fused))
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.5))
    skipped, rates = [], []
    for number, batch in enumerate(batches(3)):
        before = weights_of(model)
        accelerator.backward(loss_of(model, batch) * (float("inf") if number == 1 else 1))
        optimizer.step()
        scheduler.step()
        skipped.append((optimizer.step_was_skipped, accelerator.optimizer_step_was_skipped))
        rates.append(scheduler.get_last_lr()[0])
        assert all(torch.equal(before[n], w) for n, w in weights_of(model).items()) == (number == 1)
        optimizer.zero_grad()
    assert skipped == [(False, False), (True, True), (False, False)]
    assert rates == [0.05, 0.05, 0.025]
    assert accelerator.scaler.get_scale() == 2.0**15


def test_a_step_is_as_many_kernels_as_the_scalers_own() -> None:
    accelerator, model, optimizer = _set_up("fp16", lambda model: _sgd(model, fused=True))
    own, scaler = make_model(), mpamp.GradScaler("cpu")
    own_optimizer = _sgd(own, fused=True)
    _train(accelerator, model, optimizer, 1)
    train_by_hand(own, own_optimizer, torch.float16, 1, scaler=scaler)
    (batch,) = batches(1)
    accelerator.backward(loss_of(model, batch))
    scaler.scale(loss_of(own, batch)).backward()
    with KernelCounter() as ours:
        optimizer.step()
        assert not optimizer.step_was_skipped
    with KernelCounter() as plain:
        scaler.step(own_optimizer)
        scaler.update()
    assert ours.counts == plain.counts


# -- Several optimizers --------------------------------------------------------------------------------


def _pair(**options: Any) -> tuple[Accelerator, Any, list[Any]]:
    accelerator = Accelerator(mixed_precision="fp16", cpu=True, **options)
    model = make_model()
    optimizers = [torch.optim.SGD(model[number].parameters(), lr=0.1) for number in (0, 2)]
    model, *optimizers = accelerator.prepare(model, *optimizers)
    return accelerator, model, optimizers


def test_two_optimizers_step_by_one_scale() -> None:
    handlers = [GradScalerKwargs(init_scale=4.0, growth_interval=1)]
    accelerator, model, optimizers = _pair(kwargs_handlers=handlers)
    for batch in batches(STEPS):
        accelerator.backward(loss_of(model, batch))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    scaler = mpamp.GradScaler("cpu", init_scale=4.0, growth_interval=1)

    def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    expected = _by_hand("fp16", plain_sgd, scaler=scaler, clip=lambda p: nn.utils.clip_grad_norm_(p, 0.5))
    _assert_equal(model, expected)
    assert len(accelerator.scaler.history) == STEPS - 1  # the last iteration's scale moves before the next loss


def test_clipping_some_parameters_leaves_other_optimizers_gradients() -> None:
    """They may have an inf that is about to be zeroed."""
    accelerator, model, (first, second) = _pair()
    (batch,) = batches(1)
    accelerator.backward(loss_of(model, batch))
    model[2].weight.grad.fill_(float("inf"))
    accelerator.clip_grad_norm_(model[0].parameters(), 0.5)
    assert not accelerator.scaler.is_unscaled(second.optimizer)
    first.step()
    assert not first.step_was_skipped
    second.zero_grad()
    accelerator.backward(loss_of(model, batch))
    second.step()
    assert not second.step_was_skipped
    assert [record.skipped for record in accelerator.scaler.history] == [False]


# -- Saved states --------------------------------------------------------------------------------------


def test_a_saved_state_goes_on(tmp_path: Path) -> None:
    handlers = [GradScalerKwargs(init_scale=64.0, growth_interval=3)]
    accelerator, model, optimizer = _set_up("fp16", kwargs_handlers=handlers)
    _train(accelerator, model, optimizer)
    accelerator.save_state(str(tmp_path))
    AcceleratorState._reset_state(True)
    again, loaded, optimizer = _set_up("fp16")
    again.load_state(str(tmp_path))
    assert again.scaler.state_dict() == accelerator.scaler.state_dict()
    assert (again.scaler.get_scale(), again.scaler.get_growth_interval()) == (128.0, 3)
    _assert_equal(loaded, weights_of(model))


def test_states_are_exchanged_with_torchs_scaler(tmp_path: Path) -> None:
    accelerator, model, optimizer = _set_up("fp16", kwargs_handlers=[GradScalerKwargs(init_scale=64.0)])
    _train(accelerator, model, optimizer)
    accelerator.save_state(str(tmp_path / "ours"))
    own = accelerate.Accelerator(mixed_precision="fp16", cpu=True)
    own.scaler = torch.amp.GradScaler("cpu")
    model = make_model()
    own.prepare(model, _sgd(model))
    own.load_state(str(tmp_path / "ours"))
    assert own.scaler.state_dict()["scale"] == 64
    own.save_state(str(tmp_path / "theirs"))
    accelerator.scaler.update(2.0)
    accelerator.load_state(str(tmp_path / "theirs"))
    assert accelerator.scaler.get_scale() == 64


def test_the_state_is_saved_after_the_iteration_of_two_optimizers(tmp_path: Path) -> None:
    accelerator, model, optimizers = _pair(kwargs_handlers=[GradScalerKwargs(init_scale=4.0, growth_interval=1)])
    accelerator.backward(loss_of(model, next(batches(1))))
    for optimizer in optimizers:
        optimizer.step()
    accelerator.save_state(str(tmp_path))
    assert torch.load(tmp_path / "scaler.pt")["scale"] == 8


def test_a_prepared_optimizer_can_be_pickled() -> None:
    _, _, optimizer = _set_up("fp16")
    copy = pickle.loads(pickle.dumps(optimizer))
    assert copy.param_groups[0]["lr"] == 0.1
    assert copy.step_was_skipped is False


# -- Settings ------------------------------------------------------------------------------------------


def test_the_scaler_is_the_one_that_is_asked_for() -> None:
    scaler = mpamp.GradScaler("cpu", init_scale=32.0, min_scale=2.0)
    accelerator, model, optimizer = _set_up("fp16", scaler=scaler)
    _train(accelerator, model, optimizer, 1)
    assert accelerator.scaler is scaler
    assert len(scaler.history) == 1
    AcceleratorState._reset_state(True)
    with pytest.raises(ValueError, match="a scaler is for mixed_precision='fp16', which is 'bf16' here"):
        _set_up("bf16", scaler=scaler)


def test_a_scaler_of_torchs_own_is_served() -> None:
    scaler = torch.amp.GradScaler("cpu")
    accelerator, model, optimizer = _set_up("fp16", scaler=scaler)
    _train(accelerator, model, optimizer, before_step=lambda: accelerator.clip_grad_norm_(model.parameters(), 0.5))
    expected = _by_hand("fp16", clip=lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5))
    for name, weight in weights_of(model).items():
        torch.testing.assert_close(weight, expected[name])


def test_rules_that_can_not_be_are_said_when_it_is_made() -> None:
    with pytest.raises(mpamp.UnknownOpError):
        _set_up("bf16", ops={"no_such_op": "fp32"})


def test_a_compiled_model_trains_the_same() -> None:
    accelerator = Accelerator(mixed_precision="bf16", cpu=True, dynamo_backend="eager", ops={"linear": "fp32"})
    model = make_model()
    model, optimizer = accelerator.prepare(model, _sgd(model))
    _train(accelerator, model, optimizer)
    expected = _by_hand("bf16", ops={"linear": "fp32"})
    for name, weight in weights_of(accelerator.unwrap_model(model, keep_torch_compile=False)).items():
        torch.testing.assert_close(weight, expected[name])
