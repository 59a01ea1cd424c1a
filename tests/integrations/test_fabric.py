"""mpamp's plugin in Lightning's Fabric."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpamp
from mpamp.testing.counting import WeightCastCounter

from .digits import batches, loader, loss_of, make_model, train_by_hand, weights_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    fabrics = pytest.importorskip(
        "lightning.fabric", reason="lightning is not installed: pip install 'mpamp[lightning]'"
    )
    from mpamp.integrations.lightning import MpampFabricPrecision

STEPS = 4
PARAMETERS = 4
DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
BOTH = pytest.mark.parametrize("precision", DTYPES)


def _sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)


def _set_up(plugin: Any, make_optimizer: Any = _sgd) -> tuple[Any, Any, Any]:
    fabric = fabrics.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    model = make_model()
    return (fabric, *fabric.setup(model, make_optimizer(model)))


def _train(fabric: Any, model: Any, optimizer: Any, steps: int = STEPS, before_step: Any = lambda: None) -> None:
    for batch in fabric.setup_dataloaders(loader(steps)):
        fabric.backward(loss_of(model, batch))
        before_step()
        optimizer.step()
        optimizer.zero_grad()


def _loss_as_fabrics(model: nn.Module, batch: Any) -> torch.Tensor:
    """Fabric casts what goes into a model and what comes out of it, and has no region around the loss."""
    output = model(batch[0].to(torch.get_autocast_dtype("cpu"))).float()
    with mpamp.autocast("cpu", enabled=False):
        return nn.functional.cross_entropy(output, batch[1])


def _by_hand(precision: str, make_optimizer: Any = _sgd, **options: Any) -> dict[str, torch.Tensor]:
    model = make_model()
    scaler = mpamp.GradScaler("cpu") if precision == "16-mixed" else None
    options = {"scaler": scaler, "compute_loss": _loss_as_fabrics, **options}
    train_by_hand(model, make_optimizer(model), DTYPES[precision], STEPS, **options)
    return weights_of(model)


def _assert_equal(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    for name, weight in weights_of(model).items():
        assert torch.equal(weight, weights[name.removeprefix("_forward_module.")]), name


@BOTH
def test_training_is_the_loops_by_hand(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", None)  # it would be called where a region of torch's was left
    plugin = MpampFabricPrecision(precision)
    fabric, model, optimizer = _set_up(plugin)
    with WeightCastCounter(model) as casts:
        _train(fabric, model, optimizer)
    _assert_equal(model, _by_hand(precision))
    assert casts.count == STEPS * PARAMETERS
    assert (plugin.scaler is None) == (precision == "bf16-mixed")
    if precision == "16-mixed":
        assert len(plugin.scaler.history) == STEPS


def test_rules_hold_in_the_models_and_in_fabrics_own_region() -> None:
    seen = []
    fabric, model, _ = _set_up(MpampFabricPrecision("bf16-mixed", ops={"linear": "fp32", "relu": "fp32"}))
    model.module[0].register_forward_hook(lambda _, args, output: seen.append((args[0].dtype, output.dtype)))
    images, _ = next(batches(1))
    assert model(images).dtype is torch.float32
    assert seen == [(torch.bfloat16, torch.float32)]
    with fabric.autocast():
        assert nn.functional.linear(images, torch.ones(2, 64)).dtype is torch.float32
        assert images.mm(torch.ones(64, 2)).dtype is torch.bfloat16


@pytest.mark.parametrize("is_fused", [False, True])
def test_clipped_gradients_are_unscaled_and_may_be_clipped_twice(is_fused: bool) -> None:
    """Lightning's own plugin refuses both."""

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return _sgd(model, fused=is_fused)

    fabric, model, optimizer = _set_up(MpampFabricPrecision("16-mixed"), make_optimizer)

    def clip() -> None:
        fabric.clip_gradients(model, optimizer, clip_val=0.01)
        fabric.clip_gradients(model, optimizer, max_norm=0.05)

    def clip_by_hand(parameters: Any) -> None:
        parameters = list(parameters)
        nn.utils.clip_grad_value_(parameters, 0.01)
        nn.utils.clip_grad_norm_(parameters, 0.05)

    _train(fabric, model, optimizer, before_step=clip)
    _assert_equal(model, _by_hand("16-mixed", make_optimizer, clip=clip_by_hand))


def test_accumulation_is_one_step() -> None:
    fabric, model, optimizer = _set_up(MpampFabricPrecision("16-mixed"))
    for number, batch in enumerate(batches(2 * STEPS), start=1):
        with fabric.no_backward_sync(model, enabled=bool(number % 2)):
            fabric.backward(loss_of(model, batch) / 2)
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    _assert_equal(model, _by_hand("16-mixed", every=2))


def test_a_closure_is_called_once() -> None:
    fabric, model, optimizer = _set_up(MpampFabricPrecision("16-mixed"))
    losses = []
    for batch in batches(STEPS):

        def closure(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            fabric.backward(loss)
            losses.append(loss.item())
            return loss

        optimizer.step(closure)
    assert len(losses) == STEPS
    _assert_equal(model, _by_hand("16-mixed"))


def test_lbfgs_is_refused_in_float16() -> None:
    _, _, optimizer = _set_up(MpampFabricPrecision("16-mixed"), lambda model: torch.optim.LBFGS(model.parameters()))
    with pytest.raises(TypeError, match="LBFGS"):
        optimizer.step(lambda: None)


@pytest.mark.parametrize("is_back", [False, True], ids=["from lightning's", "to lightning's"])
def test_the_scale_is_saved_and_loaded_with_the_rest(is_back: bool, tmp_path: Path) -> None:
    saved = MpampFabricPrecision("16-mixed", scaler=mpamp.GradScaler("cpu", init_scale=64.0))
    loaded: Any = MpampFabricPrecision("16-mixed")
    own = fabrics.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
    if is_back:
        loaded = fabrics.plugins.MixedPrecision("16-mixed", "cpu")
    else:
        saved = own
    fabric, model, optimizer = _set_up(saved)
    _train(fabric, model, optimizer)
    fabric.save(tmp_path / "run.ckpt", {"model": model, "optimizer": optimizer, "precision": saved})
    fabric, again, optimizer = _set_up(loaded)
    fabric.load(tmp_path / "run.ckpt", {"model": again, "optimizer": optimizer, "precision": loaded})
    assert loaded.scaler.state_dict()["scale"] == 64
    assert loaded.scaler.state_dict()["_growth_tracker"] == STEPS
    _assert_equal(again, weights_of(model.module))


def test_two_models_with_an_optimizer_each() -> None:
    plugin = MpampFabricPrecision("16-mixed")
    fabric = fabrics.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    pairs = [fabric.setup(model, _sgd(model)) for model in (make_model(0), make_model(1))]
    for batch in batches(STEPS):
        for model, optimizer in pairs:
            fabric.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    assert len(plugin.scaler.history) == 2 * STEPS
    _assert_equal(pairs[0][0], _by_hand("16-mixed"))


def test_what_it_can_not_be_is_said_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="must be '16-mixed' or 'bf16-mixed'"):
        MpampFabricPrecision("32-true")
    with pytest.raises(ValueError, match="does not use a scaler"):
        MpampFabricPrecision("bf16-mixed", scaler=mpamp.GradScaler("cpu"))


def test_the_package_lightning_fabric_is_served_alike() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        standalone = pytest.importorskip("lightning_fabric", reason="lightning_fabric is not installed")
        from mpamp.integrations import pytorch_lightning as integration
    fabric = standalone.Fabric(accelerator="cpu", devices=1, plugins=[integration.MpampFabricPrecision("16-mixed")])
    model = make_model()
    model, optimizer = fabric.setup(model, _sgd(model))
    _train(fabric, model, optimizer)
    _assert_equal(model, _by_hand("16-mixed"))
