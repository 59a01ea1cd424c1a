"""timm's NativeScaler: the same calls with mpamp's scaler, against timm's own."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import mpamp
from mpamp.testing import WeightCastCounter
from tests.integrations.steps import BF16, F16, TOLERANCE, Net, batches, needs, sgd, weights_of

needs("timm")
import timm  # noqa: E402
import timm.utils  # noqa: E402

from mpamp.integrations.timm import NativeScaler  # noqa: E402

LOSS = torch.nn.functional.cross_entropy


def train(
    loss_scaler: Any,
    dtype: torch.dtype | None,
    count: int = 12,
    net: Net | None = None,
    optimizer: Any = None,
    **call: Any,
) -> tuple[Net, Any, float]:
    net = Net() if net is None else net
    optimizer = sgd(net) if optimizer is None else optimizer
    for images, labels in batches(count):
        with mpamp.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = LOSS(net(images), labels)
        optimizer.zero_grad()
        if loss_scaler is None:
            loss.backward()
            optimizer.step()
        else:
            loss_scaler(loss, optimizer, **call)
    return net, optimizer, loss.item()


def test_it_is_timms_and_takes_its_calls() -> None:
    scaler = NativeScaler("cpu")
    assert isinstance(scaler, timm.utils.NativeScaler)
    assert isinstance(scaler._scaler, mpamp.GradScaler)
    assert scaler.state_dict_key == timm.utils.NativeScaler.state_dict_key
    assert inspect.signature(NativeScaler.__call__) == inspect.signature(timm.utils.NativeScaler.__call__)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_losses_are_float32s(dtype: torch.dtype) -> None:
    _, _, expected = train(None, None)
    scaler = NativeScaler("cpu", init_scale=2.0**10)
    net, optimizer, loss = train(scaler, dtype)
    assert loss == pytest.approx(expected, rel=TOLERANCE[dtype])
    assert set(net.seen) == {dtype}
    assert [record.skipped for record in scaler.scaler.history] == [False] * 12
    assert not scaler.scaler.last_step_skipped(optimizer)


@pytest.mark.parametrize("mode", ["norm", "value", "agc"])
def test_clipping_is_of_unscaled_gradients(mode: str) -> None:
    ours, theirs = (Net() for _ in range(2))
    scaler = NativeScaler("cpu", init_scale=2.0**8)
    images, labels = next(batches(1))
    for net in (ours, theirs):
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        loss = LOSS(net(images), labels)
        if net is ours:
            scaler(loss, optimizer, clip_grad=0.01, clip_mode=mode, parameters=net.parameters())
        else:
            loss.backward()
            timm.utils.dispatch_clip_grad(net.parameters(), 0.01, mode=mode)
            optimizer.step()
    torch.testing.assert_close(weights_of(ours), weights_of(theirs))
    assert not torch.equal(weights_of(ours), weights_of(Net()))


def test_clipping_without_parameters_is_refused_as_timm_does() -> None:
    net = Net()
    with pytest.raises(AssertionError):
        NativeScaler("cpu")(net(next(batches(1))[0]).sum(), sgd(net), clip_grad=1.0)


def test_accumulation_steps_when_it_is_told_to() -> None:
    ours, theirs = Net(), Net()
    scaler, (mine, other) = NativeScaler("cpu", init_scale=4.0), (sgd(ours), sgd(theirs))
    parts = list(batches(4))
    for i, (images, labels) in enumerate(parts):
        before = weights_of(ours)
        scaler(LOSS(ours(images), labels) / 4, mine, need_update=i == 3)
        assert torch.equal(weights_of(ours), before) == (i != 3)
    (sum(LOSS(theirs(images), labels) for images, labels in parts) / 4).backward()
    other.step()
    torch.testing.assert_close(weights_of(ours), weights_of(theirs))
    assert len(scaler.scaler.history) == 1


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
def test_a_graph_of_the_gradients_is_made_on_request() -> None:
    net = Net()
    optimizer = sgd(net)
    NativeScaler("cpu", init_scale=4.0)(net(next(batches(1))[0]).square().mean(), optimizer, create_graph=True)
    assert net.out.weight.grad is not None
    assert net.out.weight.grad.grad_fn is not None


def test_an_overflow_skips_the_step() -> None:
    net = Net()
    optimizer, scaler, before = sgd(net), NativeScaler("cpu", init_scale=4.0), weights_of(net)
    scaler(net(next(batches(1))[0]).sum() * float("inf"), optimizer)
    assert torch.equal(weights_of(net), before)
    assert scaler.scaler.last_step_skipped(optimizer)
    assert scaler.state_dict()["scale"] == 2.0


@pytest.mark.parametrize("saved_by", [NativeScaler, timm.utils.NativeScaler])
def test_resuming_is_exact(saved_by: Any) -> None:
    whole, _, _ = train(NativeScaler("cpu", init_scale=2.0**10, growth_interval=5), F16, 12)
    scaler = NativeScaler("cpu", init_scale=2.0**10, growth_interval=5)
    net, optimizer, _ = train(scaler, F16, 6)
    state = scaler.state_dict()
    if saved_by is timm.utils.NativeScaler:
        other = saved_by("cpu")
        other.load_state_dict(state)
        torch.amp.GradScaler.scale(other._scaler, torch.zeros(()))  # torch's makes its scale at the first call
        state = other.state_dict()
    resumed = Net()
    resumed.load_state_dict(net.state_dict())
    other_optimizer = sgd(resumed)
    other_optimizer.load_state_dict(optimizer.state_dict())
    again = NativeScaler("cpu")
    again.load_state_dict(state)
    for images, labels in list(batches(12))[6:]:
        with mpamp.autocast("cpu", dtype=F16):
            loss = LOSS(resumed(images), labels)
        other_optimizer.zero_grad()
        again(loss, other_optimizer)
    assert torch.equal(weights_of(resumed), weights_of(whole))
    assert again.state_dict()["scale"] == 2.0**12


def test_a_timm_model_trains_as_in_float32() -> None:
    images, labels = next(batches(1, 8))
    images = torch.nn.functional.interpolate(images.view(-1, 1, 8, 8), size=32)
    losses: dict[torch.dtype, float] = {}
    for dtype in (torch.float32, F16):
        torch.manual_seed(0)
        model = timm.create_model("test_vit", num_classes=10, img_size=32, in_chans=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = NativeScaler("cpu", init_scale=2.0**8)
        with WeightCastCounter(model) as casts:
            for _ in range(5):
                optimizer.zero_grad()
                with mpamp.autocast("cpu", dtype=dtype, enabled=dtype is F16):
                    loss = LOSS(model(images), labels)
                scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        losses[dtype] = loss.item()
        assert (casts.count > 100) == (dtype is F16)
    assert losses[F16] == pytest.approx(losses[torch.float32], rel=TOLERANCE[F16])
    assert losses[F16] < 2
