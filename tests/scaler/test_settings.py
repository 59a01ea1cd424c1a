"""The constructor, the setters and the getters."""

from __future__ import annotations

import abc
import inspect
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from mpamp.errors import MpampWarning, ScalerSettingError, ScalerUsageError, UnknownDeviceError
from mpamp.scaler import GradScaler, ScalerConfig, ScaleState

TORCH_NAMES = ["init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled"]


def test_it_is_torchs_scaler() -> None:
    assert isinstance(GradScaler("cpu"), torch.amp.GradScaler)
    assert issubclass(GradScaler, torch.amp.GradScaler)


def test_arguments_are_torchs_and_keyword_only_ones() -> None:
    ours, torchs = inspect.signature(GradScaler).parameters, inspect.signature(torch.amp.GradScaler).parameters
    assert list(ours)[: len(torchs)] == list(torchs)
    assert all(ours[name].default == torchs[name].default for name in TORCH_NAMES)
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in list(ours)[len(torchs) :])


def test_config_has_the_arguments() -> None:
    assert list(ScalerConfig(device="cpu").arguments()) == list(inspect.signature(GradScaler).parameters)


def test_arguments_by_position() -> None:
    scaler = GradScaler("cpu", 8.0, 4.0, 0.25, 3, True)
    assert scaler.get_scale() == 8.0
    assert scaler.get_growth_factor() == 4.0
    assert scaler.get_backoff_factor() == 0.25
    assert scaler.get_growth_interval() == 3
    assert scaler.is_enabled()


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_device(device: Any) -> None:
    assert GradScaler(device)._device == "cpu"


def test_no_device_is_the_current_accelerator_else_the_processor() -> None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert GradScaler()._device == ("cpu" if accelerator is None else accelerator.type)
    assert GradScaler().is_enabled()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_absent_device_disables_with_a_warning(device: str) -> None:
    with pytest.warns(MpampWarning, match=f"'{device}', which is not available") as caught:
        scaler = GradScaler(device)
    assert caught[0].filename == __file__
    assert not scaler.is_enabled()
    loss = torch.ones((), requires_grad=True)
    assert scaler.scale(loss) is loss


def test_absent_device_of_a_disabled_scaler_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GradScaler("cuda", enabled=False)


def test_unknown_device_lists_the_known() -> None:
    with pytest.raises(UnknownDeviceError, match=r"cpu.*cuda.*xpu"):
        GradScaler("cdua")


BAD = [0, -1.0, math.nan, math.inf, "2", None, True]


@pytest.mark.parametrize("value", BAD, ids=repr)
@pytest.mark.parametrize("name", ["init_scale", "growth_factor", "backoff_factor", "growth_interval"])
def test_bad_argument_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        GradScaler("cpu", **{name: value})


@pytest.mark.parametrize("value", [v for v in BAD if v is not None], ids=repr)
@pytest.mark.parametrize("name", ["min_scale", "max_scale", "max_consecutive_skips"])
def test_bad_limit_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        GradScaler("cpu", **{name: value})


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"growth_factor": 1.0}, "growth_factor"),
        ({"backoff_factor": 1.0}, "backoff_factor"),
        ({"device": 3}, "device"),
        ({"history_size": -1}, "history_size"),
        ({"history_size": 1.5}, "history_size"),
        ({"error_on_max_skips": 1}, "error_on_max_skips"),
        ({"allow_fp16_grads": "yes"}, "allow_fp16_grads"),
        ({"process_group": "world"}, "process_group"),
        ({"init_scale": 4.0, "max_scale": 2.0}, "init_scale"),
        ({"init_scale": 1.0, "min_scale": 2.0}, "init_scale"),
        ({"min_scale": 4.0, "max_scale": 2.0}, "min_scale"),
        ({"init_scale": 1e-40}, "init_scale"),
    ],
    ids=str,
)
def test_argument_out_of_range_is_named(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(ScalerSettingError, match=name):
        GradScaler(**{"device": "cpu", **arguments})


@pytest.mark.parametrize("init_scale", [2.0**-30, 2.0**127, 1, np.float32(4.0)])
def test_initial_scale_beyond_the_default_bounds_is_taken(init_scale: float) -> None:
    assert GradScaler("cpu", init_scale=init_scale).get_scale() == init_scale


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "2", None, True], ids=repr)
@pytest.mark.parametrize("name", ["growth_factor", "backoff_factor", "growth_interval"])
def test_bad_setter_value_is_named_and_changes_nothing(name: str, value: Any) -> None:
    scaler = GradScaler("cpu")
    before = scaler.state
    with pytest.raises(ValueError, match=name):
        getattr(scaler, f"set_{name}")(value)
    assert scaler.state == before


def test_setters(run_backward: Any, weights: Any) -> None:
    scaler = GradScaler("cpu")
    scaler.set_growth_factor(1.0)
    scaler.set_backoff_factor(1.0)
    scaler.set_growth_interval(7)
    assert scaler.state == ScaleState(65536.0, 0, 1.0, 1.0, 7)


def test_shorter_interval_lets_the_scale_grow_after_the_next_update(run_backward: Any, weights: Any) -> None:
    scaler = GradScaler("cpu", init_scale=2.0, growth_interval=100)
    optimizer = torch.optim.SGD(weights, lr=0.1)

    def train() -> None:
        run_backward(scaler, weights)
        scaler.step(optimizer)
        scaler.update()

    for _ in range(5):
        train()
    scaler.set_growth_interval(3)
    assert scaler._get_growth_tracker() == 2
    train()
    assert scaler.get_scale() == 4.0


def test_shorter_interval_before_the_first_scale() -> None:
    scaler = GradScaler("cpu")
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 50})
    scaler.set_growth_interval(10)
    scaler.scale(torch.ones(()))
    assert scaler._growth_tracker is not None
    assert scaler._growth_tracker.item() == 9


def test_disabled_scaler_does_nothing_and_its_getters_work(weights: Any) -> None:
    scaler = GradScaler("cpu", growth_factor=3.0, enabled=False)
    optimizer = torch.optim.SGD(weights, lr=0.5)
    loss = sum(w.sum() for w in weights)
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer, lambda: 7.0) == 7.0
    scaler.update()
    assert torch.equal(weights[0], torch.full((3,), 0.5))
    assert scaler.get_scale() == 1.0
    assert scaler.get_growth_factor() == 3.0
    assert scaler.get_growth_interval() == 2000
    assert scaler.state_dict() == {}
    assert scaler.history == []
    assert not scaler.last_step_skipped(optimizer)
    with pytest.raises(ScalerUsageError):
        _ = scaler.state


def test_disabled_scaler_takes_any_setting() -> None:
    assert not GradScaler("cpu", init_scale=0.0, growth_factor=1.0, enabled=False).is_enabled()


def test_subclass_with_its_own_arguments_and_an_abstract_base() -> None:
    class Mine(GradScaler, abc.ABC):
        def __init__(self, start: float) -> None:
            super().__init__("cpu", init_scale=start)

    assert Mine(start=4.0).get_scale() == 4.0
    assert list(inspect.signature(Mine).parameters) == ["start"]


def test_lazy_init_as_accelerate_calls_it() -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler._lazy_init_scale_growth_tracker(scaler._device)
    assert scaler._scale is not None
    assert scaler._scale.item() == 4.0
    assert scaler._growth_tracker is not None
    assert scaler._growth_tracker.dtype is torch.int32
    with pytest.raises(AssertionError, match="initialized before"):
        scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
