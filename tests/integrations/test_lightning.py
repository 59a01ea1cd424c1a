"""mpamp's plugin in Lightning's Trainer: what it trains is what a loop by hand trains, and mpamp's kernels serve it."""

from __future__ import annotations

import pickle
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpamp
from mpamp.testing.counting import WeightCastCounter

from .digits import batches, loader, loss_of, make_model, train_by_hand, weights_of
from .lightning_models import make_module, make_trainer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning", reason="lightning is not installed: pip install 'mpamp[lightning]'")
    from mpamp.integrations.lightning import MpampPrecision
    from mpamp.integrations.lightning_parts import TrainerPart

from lightning.pytorch.plugins import MixedPrecision

STEPS = 5
PARAMETERS = 4
DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
BOTH = pytest.mark.parametrize("precision", DTYPES)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _scaler(precision: str, **options: Any) -> mpamp.GradScaler | None:
    return mpamp.GradScaler("cpu", **options) if precision == "16-mixed" else None


def _by_hand(precision: str, steps: int = STEPS, make_optimizer: Any = _sgd, **options: Any) -> dict[str, torch.Tensor]:
    model = make_model()
    train_by_hand(model, make_optimizer(model), DTYPES[precision], steps, scaler=_scaler(precision), **options)
    return weights_of(model)


def _fit(plugin: Any, steps: int = STEPS, *, parts: Any = None, **options: Any) -> Any:
    module = make_module(lightning, **(parts or {}))
    make_trainer(lightning, plugin, **options).fit(module, loader(steps))
    return module


def _assert_equal(module: Any, weights: dict[str, torch.Tensor]) -> None:
    for name, weight in module.model.named_parameters():
        assert torch.equal(weight, weights[name]), name


# -- Training ------------------------------------------------------------------------------------------


@BOTH
def test_training_is_the_loops_by_hand(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", None)  # it would be called where a region of torch's was left
    plugin = MpampPrecision(precision)
    module = _fit(plugin)
    _assert_equal(module, _by_hand(precision))
    assert plugin.device == "cpu"
    if precision == "16-mixed":
        assert isinstance(plugin.scaler, mpamp.GradScaler)
        assert [record.skipped for record in plugin.scaler.history] == [False] * STEPS
    else:
        assert plugin.scaler is None


@BOTH
def test_each_weight_is_cast_once_a_step(precision: str) -> None:
    module = make_module(lightning)
    with WeightCastCounter(module) as casts:
        make_trainer(lightning, MpampPrecision(precision)).fit(module, loader(STEPS))
    assert casts.count == STEPS * PARAMETERS


def test_rules_hold_in_training_step() -> None:
    def training_step(self: Any, batch: Any, number: int) -> torch.Tensor:
        hidden = self.model[:2](batch[0])
        self.dtypes["hidden"], self.dtypes["softmax"] = hidden.dtype, hidden.softmax(1).dtype
        return loss_of(self.model, batch)

    rules = {"linear": "fp32", "softmax": "lower_precision_fp"}
    module = _fit(MpampPrecision("bf16-mixed", ops=rules), parts={"training_step": training_step})
    assert module.dtypes == {"hidden": torch.float32, "softmax": torch.bfloat16}
    _assert_equal(module, _by_hand("bf16-mixed", ops=rules))


def test_every_kind_of_step_runs_in_the_region() -> None:
    def see(name: str) -> Any:
        def step(self: Any, batch: Any, number: int) -> torch.Tensor:
            output = self.model(batch[0])
            self.dtypes[name] = output.dtype
            return nn.functional.cross_entropy(output, batch[1])

        return step

    kinds = ("training", "validation", "test", "predict")
    module = make_module(lightning, **{f"{kind}_step": see(kind) for kind in kinds})
    trainer = make_trainer(lightning, MpampPrecision("bf16-mixed"))
    trainer.fit(module, loader(1), loader(1))
    trainer.validate(module, loader(1), verbose=False)
    trainer.test(module, loader(1), verbose=False)
    losses = trainer.predict(module, loader(1))
    assert module.dtypes == dict.fromkeys(kinds, torch.bfloat16)
    assert losses[0].dtype is torch.float32


def test_accumulation_is_one_step_and_one_cast() -> None:
    plugin = MpampPrecision("16-mixed", persistent_cache=True)
    module = make_module(lightning)
    with WeightCastCounter(module) as casts:
        make_trainer(lightning, plugin, accumulate_grad_batches=2).fit(module, loader(6))
    _assert_equal(module, _by_hand("16-mixed", 3, every=2))
    assert len(plugin.scaler.history) == 3
    # Each step's first use: what counts is a dispatch mode, and hooks make none then.
    assert casts.count == PARAMETERS * 3


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipped_gradients_are_unscaled(algorithm: str, is_fused: bool) -> None:
    """Lightning's own plugin refuses fused optimizers."""
    norms = []

    def look(self: Any, optimizer: torch.optim.Optimizer) -> None:
        norms.append(nn.utils.get_total_norm([p.grad for p in self.parameters()]).item())

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.01, fused=is_fused)

    limit = 0.1 if algorithm == "norm" else 0.001
    clip = nn.utils.clip_grad_norm_ if algorithm == "norm" else nn.utils.clip_grad_value_
    module = _fit(
        MpampPrecision("16-mixed"),
        parts={"configure_optimizers": adam, "on_before_optimizer_step": look},
        gradient_clip_val=limit,
        gradient_clip_algorithm=algorithm,
    )
    expected = _by_hand("16-mixed", make_optimizer=adam, clip=lambda parameters: clip(parameters, limit))
    _assert_equal(module, expected)
    assert all(limit < norm < 10 for norm in norms)


@pytest.mark.parametrize("is_fused", [False, True])
def test_an_overflow_skips_the_step_and_lowers_the_scale(is_fused: bool) -> None:
    def training_step(self: Any, batch: Any, number: int) -> torch.Tensor:
        return loss_of(self.model, batch) * (float("inf") if number == 0 else 1)

    def configure_optimizers(self: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, fused=is_fused)

    parts = {"training_step": training_step, "configure_optimizers": configure_optimizers}
    plugin = MpampPrecision("16-mixed", scaler=mpamp.GradScaler("cpu", init_scale=1024.0))
    module = _fit(plugin, 1, parts=parts)
    _assert_equal(module, weights_of(make_model()))
    assert plugin.scaler.get_scale() == 512
    assert plugin.scaler.history == [mpamp.ScaleRecord(1, 1024.0, True)]


def test_a_training_step_that_returns_none_steps_nothing() -> None:
    parts = {"training_step": lambda self, batch, number: None}
    plugin = MpampPrecision("16-mixed")
    with pytest.warns(UserWarning, match="`training_step` returned `None`"):
        module = _fit(plugin, parts=parts)
    _assert_equal(module, weights_of(make_model()))
    assert plugin.scaler.history == []


def test_a_compiled_module_trains_the_same() -> None:
    module = make_module(lightning)
    compiled = torch.compile(module, backend="eager")
    make_trainer(lightning, MpampPrecision("bf16-mixed", ops={"linear": "fp32"})).fit(compiled, loader(2))
    expected = _by_hand("bf16-mixed", 2, ops={"linear": "fp32"})
    for name, weight in module.model.named_parameters():
        torch.testing.assert_close(weight, expected[name])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


# -- Manual optimization, closures, callbacks ----------------------------------------------------------


def _manual(training_step: Any, **parts: Any) -> dict[str, Any]:
    def configure_optimizers(self: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.model[0], self.model[2])]

    def automatic(self: Any) -> bool:
        return False

    both = {"training_step": training_step, "configure_optimizers": configure_optimizers}
    return {**both, "automatic_optimization": property(automatic, lambda self, value: None), **parts}


def test_two_optimizers_step_by_one_scale_where_both_passes_come_first() -> None:
    def training_step(self: Any, batch: Any, number: int) -> None:
        first, second = self.optimizers()
        self.manual_backward(loss_of(self.model, batch))
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()

    plugin = MpampPrecision("16-mixed", scaler=mpamp.GradScaler("cpu", init_scale=4.0, growth_interval=1))
    module = _fit(plugin, parts=_manual(training_step))
    expected = make_model()
    scaler = mpamp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    train_by_hand(expected, torch.optim.SGD(expected.parameters(), lr=0.1), torch.float16, STEPS, scaler=scaler)
    _assert_equal(module, weights_of(expected))
    assert plugin.state_dict()["scale"] == scaler.get_scale() == 4 * 2**STEPS


def test_an_adversarial_pair_trains_as_by_hand() -> None:
    """Each has a backward pass and a step of its own in one region, and the second pass sees what the first changed."""

    def losses(model: nn.Module, batch: Any) -> Any:
        yield loss_of(model, batch)
        yield -loss_of(model, batch) * 0.1

    def training_step(self: Any, batch: Any, number: int) -> None:
        for optimizer, loss in zip(self.optimizers(), losses(self.model, batch), strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    module = _fit(MpampPrecision("16-mixed"), parts=_manual(training_step))
    expected, scaler = make_model(), mpamp.GradScaler("cpu")
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (expected[0], expected[2])]
    for batch in batches(STEPS):
        with mpamp.autocast("cpu", torch.float16, cache_enabled=False):
            for optimizer, loss in zip(optimizers, losses(expected, batch), strict=True):
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    _assert_equal(module, weights_of(expected))


def test_clipping_before_a_manual_step_clips_unscaled_gradients() -> None:
    def training_step(self: Any, batch: Any, number: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss_of(self.model, batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()

    parts = _manual(training_step, configure_optimizers=lambda self: _sgd(self))
    expected = _by_hand("16-mixed", clip=lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1))
    _assert_equal(_fit(MpampPrecision("16-mixed"), parts=parts), expected)


def test_lbfgs_calls_its_closure_in_bfloat16_and_is_refused_in_float16() -> None:
    calls = []

    def training_step(self: Any, batch: Any, number: int) -> torch.Tensor:
        calls.append(self.model(batch[0]).dtype)
        return loss_of(self.model, batch)

    def configure_optimizers(self: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    parts = {"training_step": training_step, "configure_optimizers": configure_optimizers}
    module = _fit(MpampPrecision("bf16-mixed"), 1, parts=parts)
    assert calls == [torch.bfloat16] * 3
    assert loss_of(module.model, next(batches(1))) < loss_of(make_model(), next(batches(1)))
    with pytest.raises(lightning.pytorch.utilities.exceptions.MisconfigurationException, match="LBFGS"):
        _fit(MpampPrecision("16-mixed"), 1, parts=parts)


def _ema() -> Any:
    return lightning.pytorch.callbacks.EMAWeightAveraging(decay=0.5)


def _swa() -> Any:
    return lightning.pytorch.callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)


@pytest.mark.parametrize("make_callback", [_ema, _swa])
def test_averaged_weights_are_validated_though_casts_are_kept(make_callback: Any) -> None:
    """The callback swaps weights by their ``.data``, which raises no version."""

    def run(**options: Any) -> tuple[Any, list[float]]:
        losses = []

        def validation_step(self: Any, batch: Any, number: int) -> None:
            losses.append(loss_of(self.model, batch).item())

        module = make_module(lightning, validation_step=validation_step)
        plugin = MpampPrecision("bf16-mixed", **options)
        trainer = make_trainer(lightning, plugin, callbacks=[make_callback()], max_epochs=3, num_sanity_val_steps=0)
        trainer.fit(module, loader(2), loader(1))
        return module, losses

    kept, kept_losses = run(persistent_cache=True)
    anew, losses = run()
    assert len(set(losses)) == 3
    assert kept_losses == losses
    _assert_equal(kept, weights_of(anew.model))


def test_kept_casts_serve_a_whole_validation() -> None:
    module = make_module(lightning, validation_step=lambda self, batch, number: loss_of(self.model, batch))
    plugin = MpampPrecision("bf16-mixed", persistent_cache=True)
    with WeightCastCounter(module) as casts:
        make_trainer(lightning, plugin).validate(module, loader(4), verbose=False)
    assert casts.count == PARAMETERS


# -- Checkpoints ---------------------------------------------------------------------------------------


def _lightnings_own() -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=4)
    return MixedPrecision("16-mixed", "cpu", scaler)


def _mpamps(**options: Any) -> Any:
    return MpampPrecision("16-mixed", scaler=mpamp.GradScaler("cpu", **options))


@pytest.mark.parametrize("is_back", [False, True], ids=["from lightning's", "to lightning's"])
def test_a_run_goes_on_with_its_scale_by_the_other_plugin(is_back: bool, tmp_path: Path) -> None:
    saved, resumed = (_mpamps(init_scale=128.0, growth_interval=4), MixedPrecision("16-mixed", "cpu"))
    if not is_back:
        saved, resumed = _lightnings_own(), MpampPrecision("16-mixed")
    module = make_module(lightning)
    trainer = make_trainer(lightning, saved)
    trainer.fit(module, loader(3))
    path = tmp_path / "run.ckpt"
    trainer.save_checkpoint(path, weights_only=False)
    assert [key for key in torch.load(path) if "Precision" in key] == ["MixedPrecision"]
    trainer = make_trainer(lightning, resumed, max_epochs=2)
    trainer.fit(make_module(lightning), loader(2), ckpt_path=path, weights_only=False)
    # Three good steps before, two after: it grew once, one step ago.
    state = trainer.scaler.state_dict()
    assert (state["scale"], state["growth_interval"], state["_growth_tracker"]) == (256.0, 4, 1)


def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path: Path) -> None:
    whole = _fit(_mpamps(init_scale=128.0, growth_interval=2), max_epochs=2)
    trainer = make_trainer(lightning, _mpamps(init_scale=128.0, growth_interval=2))
    trainer.fit(make_module(lightning), loader(STEPS))
    trainer.save_checkpoint(tmp_path / "run.ckpt", weights_only=False)
    module = make_module(lightning)
    trainer = make_trainer(lightning, MpampPrecision("16-mixed"), max_epochs=2)
    trainer.fit(module, loader(STEPS), ckpt_path=tmp_path / "run.ckpt", weights_only=False)
    _assert_equal(module, weights_of(whole.model))


def test_a_subclass_keeps_the_name_in_checkpoints(tmp_path: Path) -> None:
    class Mine(MpampPrecision):
        pass

    trainer = make_trainer(lightning, Mine("16-mixed"))
    trainer.fit(make_module(lightning), loader(1))
    trainer.save_checkpoint(tmp_path / "run.ckpt", weights_only=False)
    assert [key for key in torch.load(tmp_path / "run.ckpt") if key in ("Mine", "MixedPrecision")] == ["MixedPrecision"]


# -- The plugin by itself ------------------------------------------------------------------------------


def test_what_it_can_not_be_is_said_when_it_is_made() -> None:
    with pytest.raises(ValueError, match=r"16-true.*must be '16-mixed' or 'bf16-mixed'"):
        MpampPrecision("16-true")
    with pytest.raises(lightning.pytorch.utilities.exceptions.MisconfigurationException, match="scaler"):
        MpampPrecision("bf16-mixed", scaler=mpamp.GradScaler("cpu"))
    with pytest.raises(mpamp.UnknownDeviceError):
        MpampPrecision("bf16-mixed", "abacus")
    with pytest.raises(mpamp.UnknownOpError):
        MpampPrecision("bf16-mixed", "cpu", ops={"no_such_op": "fp32"})


def test_its_region_follows_the_model() -> None:
    plugin = MpampPrecision("bf16-mixed")
    model = make_model()
    plugin.convert_module(model)
    assert plugin.device == "cpu"
    model.to("meta")
    assert plugin.device in ("cpu", torch.accelerator.current_accelerator())
    plugin.convert_module(nn.Linear(1, 1))
    assert plugin.forward_context().device_type == "cpu"
    assert MpampPrecision("bf16-mixed", "cpu:0").forward_context() is plugin.forward_context()


def test_it_travels_to_other_processes() -> None:
    plugin = _mpamps(init_scale=16.0)
    plugin.convert_module(make_model())
    copy = pickle.loads(pickle.dumps(plugin))
    assert copy.scaler.get_scale() == 16
    assert copy.forward_context().dtype is torch.float16


def test_a_scaler_of_torchs_own_is_served() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    module = _fit(MpampPrecision("16-mixed", scaler=scaler), gradient_clip_val=0.1)
    clip = lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1)  # noqa: E731
    model = make_model()
    train_by_hand(model, _sgd(model), torch.float16, STEPS, scaler=mpamp.GradScaler("cpu", init_scale=64.0), clip=clip)
    for name, weight in module.model.named_parameters():
        torch.testing.assert_close(weight, weights_of(model)[name])


# -- The other package ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def standalone() -> types.ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")


def test_a_trainer_of_the_other_package_names_the_module_to_take() -> None:
    """Lightning's two packages have classes of their own, and each refuses the other's plugins."""

    class Foreign:
        def __init__(self, precision: str, device: str, scaler: Any) -> None:
            self.precision = precision

    theirs = type(
        "MpampPrecision", (TrainerPart, Foreign), {"_integration": "pytorch_lightning", "_other": "lightning"}
    )
    with pytest.raises(Exception, match=r"plugin MpampPrecision of mpamp.integrations.pytorch_lightning, which is for"):
        make_trainer(lightning, theirs("bf16-mixed"))
    assert "than mpamp.integrations.lightning" in str(theirs("bf16-mixed"))
    assert str(MpampPrecision("bf16-mixed")).endswith("than mpamp.integrations.pytorch_lightning")


def test_the_package_pytorch_lightning_is_served_alike(standalone: types.ModuleType, tmp_path: Path) -> None:
    from mpamp.integrations import pytorch_lightning as integration

    module = make_module(standalone)
    plugin = integration.MpampPrecision("16-mixed")
    trainer = make_trainer(standalone, plugin, gradient_clip_val=0.1)
    with WeightCastCounter(module) as casts:
        trainer.fit(module, loader(STEPS))
    _assert_equal(module, _by_hand("16-mixed", clip=lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1)))
    assert casts.count == STEPS * PARAMETERS
    trainer.save_checkpoint(tmp_path / "run.ckpt", weights_only=False)
    resumed = make_trainer(standalone, standalone.plugins.MixedPrecision("16-mixed", "cpu"), max_epochs=2)
    resumed.fit(make_module(standalone), loader(1), ckpt_path=tmp_path / "run.ckpt", weights_only=False)
    assert resumed.scaler.state_dict()["_growth_tracker"] == STEPS + 1
