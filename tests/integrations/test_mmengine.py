"""MMEngine's AmpOptimWrapper: the same configuration with mpamp's region and scaler, on a processor too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mpamp
from mpamp.testing import WeightCastCounter
from tests.integrations.steps import BF16, F16, TOLERANCE, Net, batches, digits, needs, sgd, weights_of

needs("mmengine.runner", "mmengine.optim")
import mmengine.optim  # noqa: E402
from mmengine.model import BaseModel  # noqa: E402
from mmengine.registry import OPTIM_WRAPPERS  # noqa: E402
from mmengine.runner import Runner  # noqa: E402

from mpamp.integrations.mmengine import MpampOptimWrapper  # noqa: E402

LOSS = torch.nn.functional.cross_entropy


def train(net: Net, wrapper: mmengine.optim.OptimWrapper, parts: Any) -> float:
    for images, labels in parts:
        with wrapper.optim_context(net):
            loss = LOSS(net(images), labels)
        wrapper.update_params(loss)
    return loss.item()


def test_it_is_registered_and_is_mmengines() -> None:
    net = Net()
    built = OPTIM_WRAPPERS.build({"type": "MpampOptimWrapper", "optimizer": sgd(net), "dtype": "float16"})
    assert type(built) is MpampOptimWrapper
    assert isinstance(built, mmengine.optim.AmpOptimWrapper)
    assert isinstance(built.loss_scaler, mpamp.GradScaler)
    assert built.cast_dtype is F16


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_losses_are_float32s(dtype: str) -> None:
    plain, net = Net(), Net()
    expected = train(plain, mmengine.optim.OptimWrapper(sgd(plain)), batches(12))
    wrapper = MpampOptimWrapper(optimizer=sgd(net), dtype=dtype, loss_scale={"init_scale": 2.0**10})
    with WeightCastCounter(net) as casts:
        loss = train(net, wrapper, batches(12))
    wanted = getattr(torch, dtype)
    assert loss == pytest.approx(expected, rel=TOLERANCE[wanted])
    assert set(net.seen) == {wanted}
    assert casts.count == 4 * 12
    assert [record.skipped for record in wrapper.loss_scaler.history] == [False] * 12


def test_the_default_is_the_devices_dtype_and_a_dynamic_scale() -> None:
    net = Net()
    wrapper = MpampOptimWrapper(optimizer=sgd(net))
    train(net, wrapper, batches(1))
    assert net.seen == [BF16]
    assert wrapper.loss_scaler.get_scale() == 2.0**16


def test_rules_hold_in_its_region() -> None:
    net = Net()
    train(net, MpampOptimWrapper(optimizer=sgd(net), dtype=F16, ops={"linear": "fp32"}), batches(1))
    assert net.seen == [torch.float32]


def test_accumulation_and_clipping_are_float32s() -> None:
    plain, net = Net(), Net()
    options = {"accumulative_counts": 3, "clip_grad": {"max_norm": 0.05}}
    theirs = mmengine.optim.OptimWrapper(sgd(plain), accumulative_counts=3, clip_grad={"max_norm": 0.05})
    ours = MpampOptimWrapper(optimizer=sgd(net), dtype=F16, loss_scale=2.0**8, **options)
    for wrapper, model in ((theirs, plain), (ours, net)):
        wrapper.initialize_count_status(model, 0, 8)  # the last update is of two iterations
        train(model, wrapper, batches(8))
    torch.testing.assert_close(weights_of(net), weights_of(plain), rtol=0, atol=2e-3)
    assert (weights_of(net) - weights_of(Net())).norm() > 0.02
    assert len(ours.loss_scaler.history) == 3
    norm = ours.message_hub.get_scalar("train/grad_norm").current()
    assert 0.1 < norm < 10


@pytest.mark.parametrize("scale", [512.0, 512])
def test_a_number_is_a_scale_that_stays(scale: float) -> None:
    net = Net()
    wrapper = MpampOptimWrapper(optimizer=sgd(net), dtype=F16, loss_scale=scale)
    wrapper.update_params(net(next(batches(1))[0]).sum() * float("inf"))
    assert wrapper.loss_scaler.last_step_skipped(wrapper.optimizer)
    assert wrapper.loss_scaler.get_scale() == 512.0


@pytest.mark.parametrize(
    ("argument", "error"), [({"loss_scale": "static"}, TypeError), ({"loss_scale": True}, TypeError)]
)
def test_a_wrong_scale_is_refused(argument: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="loss_scale must be of type float, dict"):
        MpampOptimWrapper(optimizer=sgd(Net()), **argument)


def test_a_dtype_that_the_device_cannot_do_is_refused() -> None:
    with pytest.raises(mpamp.UnsupportedDtypeError, match="float64"):
        MpampOptimWrapper(optimizer=sgd(Net()), dtype="float64")


def test_an_overflow_skips_the_step() -> None:
    net = Net()
    wrapper, before = MpampOptimWrapper(optimizer=sgd(net), dtype=F16, loss_scale={"init_scale": 8.0}), weights_of(net)
    wrapper.update_params(net(next(batches(1))[0]).sum() * float("inf"))
    assert torch.equal(weights_of(net), before)
    assert wrapper.loss_scaler.get_scale() == 4.0


def test_resuming_is_exact() -> None:
    settings: dict[str, Any] = {"dtype": F16, "loss_scale": {"init_scale": 2.0**10, "growth_interval": 5}}
    whole = Net()
    train(whole, MpampOptimWrapper(optimizer=sgd(whole), **settings), batches(12))
    net, resumed = Net(), Net()
    wrapper = MpampOptimWrapper(optimizer=sgd(net), **settings)
    train(net, wrapper, list(batches(12))[:6])
    state = wrapper.state_dict()
    assert state["loss_scaler"]["scale"] == 2.0**11
    resumed.load_state_dict(net.state_dict())
    again = MpampOptimWrapper(optimizer=sgd(resumed), dtype=F16)
    again.load_state_dict(state)
    train(resumed, again, list(batches(12))[6:])
    assert torch.equal(weights_of(resumed), weights_of(whole))
    assert again.loss_scaler.get_scale() == 2.0**12


# -- A whole Runner ------------------------------------------------------------------------------------


class Model(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, images: Any, labels: Any, mode: str = "loss") -> Any:
        logits = self.net(images)
        return {"loss": LOSS(logits, labels)} if mode == "loss" else logits


def runner_of(folder: Path, epochs: int, *, resume: bool = False, wrapper: dict[str, Any]) -> Runner:
    images, labels = digits()
    data = torch.utils.data.TensorDataset(images[:256], labels[:256])
    return Runner(
        Model(),
        str(folder),
        train_dataloader={
            "batch_size": 32,
            "dataset": data,
            "sampler": {"type": "DefaultSampler", "shuffle": False},
            "collate_fn": {"type": "default_collate"},
        },
        train_cfg={"by_epoch": True, "max_epochs": epochs},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.2, "momentum": 0.8}, **wrapper},
        default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": 1}},
        resume=resume,
        log_level="ERROR",
        experiment_name=f"{folder.name}-{epochs}-{resume}",
    )


AMP: dict[str, Any] = {"type": "MpampOptimWrapper", "dtype": "float16", "loss_scale": {"init_scale": 1024.0}}


@pytest.mark.filterwarnings("ignore:Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD:UserWarning")
def test_a_runner_trains_as_in_float32_and_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # MMEngine 0.10's own checkpoints hold its classes
    plain = runner_of(tmp_path / "float32", 2, wrapper={"type": "OptimWrapper"})
    plain.train()
    whole = runner_of(tmp_path / "whole", 2, wrapper=AMP)
    whole.train()
    net = whole.model.net
    assert set(net.seen) == {F16}
    assert len(whole.optim_wrapper.loss_scaler.history) == 16
    torch.testing.assert_close(weights_of(net), weights_of(plain.model.net), rtol=0, atol=2e-2)
    runner_of(tmp_path / "parts", 1, wrapper=AMP).train()
    resumed = runner_of(tmp_path / "parts", 2, wrapper=AMP, resume=True)
    resumed.train()
    assert resumed.model.net.seen == [F16] * 8
    assert torch.equal(weights_of(resumed.model.net), weights_of(net))
