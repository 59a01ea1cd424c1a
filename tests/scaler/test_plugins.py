"""The hooks: a scaler of the hardware's own, and events."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mpamp
from mpamp.plugins.hookspecs import hookimpl
from mpamp.plugins.manager import manager
from mpamp.scaler import GradScaler, ScaleEvent, ScalerConfig


class Plugin:
    """Makes scalers and hears of steps."""

    def __init__(self) -> None:
        self.configs: list[tuple[str, ScalerConfig]] = []
        self.events: list[ScaleEvent] = []
        self.made: Any = None

    @hookimpl
    def mpamp_make_scaler(self, device_type: str, config: ScalerConfig) -> Any:
        self.configs.append((device_type, config))
        return self.made(config) if self.made is not None else None

    @hookimpl
    def mpamp_scale_event(self, event: ScaleEvent) -> None:
        self.events.append(event)


@pytest.fixture
def plugin() -> Iterator[Plugin]:
    """Return a plugin that is registered during the test."""
    plugin, plugins = Plugin(), manager()._pm
    plugins.register(plugin)
    plugins.check_pending()
    yield plugin
    plugins.unregister(plugin)


class Flagged(GradScaler):
    """A scaler of hardware that has an overflow flag, made with another signature than ours."""

    flag = False

    def __init__(self, config: ScalerConfig) -> None:
        self.times_made = getattr(self, "times_made", 0) + 1
        super().__init__(**config.arguments())

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        return {device: value.fill_(float(self.flag)) for device, value in found.items()}


def test_made_by_the_plugin_from_the_checked_arguments(plugin: Plugin) -> None:
    plugin.made = Flagged
    scaler = GradScaler("cpu:0", 8, growth_interval=3, allow_fp16_grads=True)
    assert type(scaler) is Flagged
    assert scaler.times_made == 1
    ((device_type, config),) = plugin.configs
    assert device_type == config.device == "cpu"
    assert (config.init_scale, config.growth_interval, config.allow_fp16_grads) == (8.0, 3, True)
    assert (config.min_scale, config.max_scale) == (2.0**-16, 2.0**126)


def test_its_flag_skips(plugin: Plugin, weights: Any, run_backward: Any) -> None:
    plugin.made = Flagged
    scaler, optimizer = GradScaler("cpu", init_scale=8.0), torch.optim.SGD(weights, lr=0.5)
    scaler.flag = True
    run_backward(scaler, weights)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step_skipped(optimizer)
    assert scaler.get_scale() == 4.0


def test_any_of_torchs_scalers_will_do(plugin: Plugin) -> None:
    plugin.made = lambda config: torch.amp.GradScaler(config.device, init_scale=config.init_scale)
    assert type(GradScaler("cpu")) is torch.amp.GradScaler


def test_none_leaves_it_to_mpamp(plugin: Plugin) -> None:
    assert type(GradScaler("cpu")) is GradScaler
    assert len(plugin.configs) == 1


def test_what_is_no_scaler_is_left_out(plugin: Plugin) -> None:
    plugin.made = lambda config: object()
    with pytest.warns(mpamp.MpampWarning, match="the scalers for cpu of plugin .*mpamp_make_scaler returned"):
        assert type(GradScaler("cpu")) is GradScaler
    assert type(GradScaler("cpu")) is GradScaler
    assert len(plugin.configs) == 1


class Exit(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), Exit("x")])
def test_a_plugin_that_fails_to_make_a_scaler_is_left_out(plugin: Plugin, error: BaseException) -> None:
    def fail(config: ScalerConfig) -> Any:
        raise error

    plugin.made = fail
    with pytest.warns(mpamp.MpampWarning, match="the scalers for cpu of plugin") as caught:
        assert [type(GradScaler("cpu")), type(GradScaler("cpu"))] == [GradScaler, GradScaler]
    assert (len(caught), len(plugin.configs)) == (1, 1)


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), Exit("x")])
def test_a_listener_that_fails_is_not_told_again(
    plugin: Plugin, scaler: GradScaler, weights: Any, run_backward: Any, error: BaseException
) -> None:
    class Events(list[ScaleEvent]):
        def append(self, event: ScaleEvent) -> None:
            super().append(event)
            raise error

    plugin.events = Events()
    optimizer = torch.optim.SGD(weights, lr=0.1)
    run_backward(scaler, weights)
    with pytest.warns(mpamp.MpampWarning, match="the scale events of plugin"):
        scaler.step(optimizer)
    scaler.update()
    run_backward(scaler, weights)
    scaler.step(optimizer)  # warnings are errors
    assert (len(plugin.events), scaler.last_step_skipped(optimizer)) == (1, False)


def test_an_interrupt_of_a_listener_is_the_users(
    plugin: Plugin, scaler: GradScaler, weights: Any, run_backward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(event: ScaleEvent) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plugin, "events", SimpleNamespace(append=interrupt))
    run_backward(scaler, weights)
    with pytest.raises(KeyboardInterrupt):
        scaler.step(torch.optim.SGD(weights, lr=0.1))


def test_not_asked_for_subclasses_and_disabled_scalers(plugin: Plugin) -> None:
    class Mine(GradScaler):
        pass

    plugin.made = Flagged
    assert type(Mine("cpu")) is Mine
    assert type(GradScaler("cpu", enabled=False)) is GradScaler
    assert plugin.configs == []


def test_bad_arguments_are_errors_before_the_plugin_is_asked(plugin: Plugin) -> None:
    with pytest.raises(ValueError, match="init_scale"):
        GradScaler("cpu", init_scale=0.0)
    with pytest.raises(TypeError, match="unexpected"):
        GradScaler("cpu", unexpected=1)  # type: ignore[call-arg]
    assert plugin.configs == []


def test_signature_is_the_constructors() -> None:
    assert list(inspect.signature(GradScaler).parameters)[:2] == ["device", "init_scale"]


@pytest.mark.parametrize("fused", [False, True])
def test_events_of_each_optimizer(
    plugin: Plugin, fused: bool, scaler: GradScaler, weights: Any, run_backward: Any
) -> None:
    optimizers = [torch.optim.SGD([w], lr=0.1, fused=fused) for w in weights]
    for _ in range(2):
        run_backward(scaler, weights[:1])
        run_backward(scaler, weights[1:], factor=math.inf)
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    assert plugin.events == [
        ScaleEvent(1, 1024.0, False, optimizers[0]),
        ScaleEvent(1, 1024.0, True, optimizers[1]),
        ScaleEvent(2, 512.0, False, optimizers[0]),
        ScaleEvent(2, 512.0, True, optimizers[1]),
    ]


def test_no_event_where_it_would_make_the_host_wait(
    plugin: Plugin, like_accelerator: None, scaler: GradScaler, weights: Any, run_backward: Any
) -> None:
    optimizer = torch.optim.SGD(weights, lr=0.1, fused=True)
    run_backward(scaler, weights)
    scaler.step(optimizer)
    scaler.update()
    assert plugin.events == []
    assert not scaler.last_step_skipped(optimizer)
    assert not scaler.last_step_skipped(optimizer)
    assert plugin.events == [ScaleEvent(1, 1024.0, False, optimizer)]


def test_listening_costs_no_further_read(
    plugin: Plugin,
    like_accelerator: None,
    scaler: GradScaler,
    weights: Any,
    run_backward: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads, real = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(tensor.shape) or real(tensor))
    optimizer = torch.optim.SGD(weights, lr=0.1)
    for number in (1, 2):
        run_backward(scaler, weights)
        scaler.step(optimizer)
        scaler.update()
        assert reads == [torch.Size([2])] * number
        assert len(plugin.events) == number


def test_event_of_a_plain_optimizer_comes_before_it_steps(
    plugin: Plugin, scaler: GradScaler, weights: Any, run_backward: Any
) -> None:
    optimizer = torch.optim.SGD(weights, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.extend(plugin.events))
    seen: list[ScaleEvent] = []
    run_backward(scaler, weights)
    scaler.step(optimizer)
    assert len(seen) == 1
