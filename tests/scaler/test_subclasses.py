"""Subclasses that override what people override in torch's scaler, and what they reach into."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from mpamp.scaler import GradScaler, ScaleRecord


class OwnStep(GradScaler):
    """As torch's own, and as in many a trainer that also logs."""

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        if not sum(v.item() for v in optimizer_state["found_inf_per_device"].values()):
            return optimizer.step(*args, **kwargs)
        return None


class CallingStep(GradScaler):
    calls = 0

    def _maybe_opt_step(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super()._maybe_opt_step(*args, **kwargs)


class CallingUpdate(GradScaler):
    updates = 0

    def update(self, new_scale: Any = None) -> None:
        super().update(new_scale)
        self.updates += 1


class OwnUpdate(GradScaler):
    """As ShardedGradScaler: it moves the scale and begins the next iteration by itself."""

    def update(self, new_scale: Any = None) -> None:
        scale, tracker = self._check_scale_growth_tracker("update")
        found = sum(v for s in self._per_optimizer_states.values() for v in s["found_inf_per_device"].values())
        rule = (self._growth_factor, self._backoff_factor, self._growth_interval)
        torch._amp_update_scale_(scale, tracker, found, *rule)
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)


class ClearingUpdate(OwnUpdate):
    def update(self, new_scale: Any = None) -> None:
        states = self._per_optimizer_states
        super().update(new_scale)
        states.clear()
        self._per_optimizer_states = states


class AllowingFp16(GradScaler):
    """The best known hack."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)


class OwnUnscaling(GradScaler):
    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        return torch.amp.GradScaler._unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16)


class OwnUnscale(GradScaler):
    """As ShardedGradScaler: another ``unscale_`` around the same ``_unscale_grads_``."""

    def unscale_(self, optimizer: Any) -> None:
        scale, _ = self._check_scale_growth_tracker("unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:
            raise RuntimeError("unscale_() has already been called")
        found_inf = torch.zeros((), dtype=torch.float32)
        found = self._unscale_grads_(optimizer, scale.double().reciprocal().float(), found_inf, True)
        state["found_inf_per_device"] = found
        state["stage"] = OptState.UNSCALED


class OneElement(OwnUnscale):
    """As ShardedGradScaler: what is found has one dimension."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf.reshape(1), allow_fp16)


class Counting(GradScaler):
    """As ShardedGradScaler on two ranks, and others that add up what ranks have found."""

    def _unscale_grads_(self, *args: Any) -> Any:
        return {device: 2 * found for device, found in super()._unscale_grads_(*args).items()}


class CountingInPlace(GradScaler):
    """The same to what the state has, after ``unscale_``."""

    def unscale_(self, optimizer: Any) -> None:
        super().unscale_(optimizer)
        for found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            found.mul_(2)


class Telling(GradScaler):
    """A yes or no for each of several things that were looked at."""

    def _unscale_grads_(self, *args: Any) -> Any:
        found = super()._unscale_grads_(*args)
        return {device: torch.stack((each, torch.zeros_like(each))) > 0 for device, each in found.items()}


class OneElementScale(GradScaler):
    def _lazy_init_scale_growth_tracker(self, dev: Any) -> None:
        self._scale = torch.full((1,), 64.0, device=dev)
        self._growth_tracker = torch.zeros(1, dtype=torch.int32, device=dev)


class OwnCheck(GradScaler):
    def _check_inf_per_device(self, optimizer: Any) -> Any:
        return torch.amp.GradScaler._check_inf_per_device(self, optimizer)


class OwnScale(GradScaler):
    """As ShardedGradScaler: the result has the loss's dtype. No loss says when a backward pass begins at it."""

    def scale(self, outputs: Any) -> Any:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(outputs.device)
        return (outputs * self._scale).to(outputs.dtype)


class Fixed(GradScaler):
    """A scale of the user's own, by each of the places that torch reads it from."""

    def _get_scale_async(self) -> Any:
        return self._scale

    def _lazy_init_scale_growth_tracker(self, dev: Any) -> None:
        self._scale = torch.full((), 64.0, device=dev)
        self._growth_tracker = torch.zeros((), dtype=torch.int32, device=dev)


SUBCLASSES = [
    OwnStep,
    CallingStep,
    CallingUpdate,
    OwnUpdate,
    ClearingUpdate,
    AllowingFp16,
    OwnUnscaling,
    OwnUnscale,
    OneElement,
    Counting,
    CountingInPlace,
    Telling,
    OneElementScale,
    OwnCheck,
    OwnScale,
    Fixed,
]
every_subclass = pytest.mark.parametrize("make", SUBCLASSES)
OPTIONS = [{"foreach": False}, {"foreach": True}, {"fused": True}]
FACTORS = [1.0, math.inf, 2.0, 1.0, math.nan, 3.0]


def train(make: Any, options: Any, *, clips: bool, shares: bool) -> tuple[Any, ...]:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD(weights[:1], lr=0.5, **options), torch.optim.SGD(weights[not shares :], lr=0.5)]
    scaler = make("cpu", init_scale=64.0, growth_interval=2)
    skips = []
    for factor in FACTORS:
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(sum(w.sum() for w in weights) * factor).backward()
        for optimizer in optimizers:
            if clips:
                scaler.unscale_(optimizer)
        if clips:
            torch.nn.utils.clip_grad_value_(weights, 1.5)
        for optimizer in optimizers:
            scaler.step(optimizer)
            if isinstance(scaler, GradScaler):
                skips.append(scaler.last_step_skipped(optimizer))
        scaler.update()
    return [w.tolist() for w in weights], scaler.state_dict(), skips


@every_subclass
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("shares", [False, True])
def test_trains_as_the_base_class(make: Any, options: Any, clips: bool, shares: bool) -> None:
    if shares and issubclass(make, (OwnUnscaling, OwnUnscale)):
        pytest.skip("it divides by itself, so it divides twice, as torch's")
    expected = train(GradScaler, options, clips=clips, shares=shares)
    assert train(make, options, clips=clips, shares=shares) == expected
    assert expected[2] == [not math.isfinite(factor) for factor in FACTORS for _ in range(2)]
    if not shares:
        assert train(torch.amp.GradScaler, options, clips=clips, shares=False)[:2] == expected[:2]


def test_overridden_methods_are_called(weights: Any, run_backward: Any) -> None:
    stepping, updating = CallingStep("cpu"), CallingUpdate("cpu")
    for scaler in (stepping, updating):
        run_backward(scaler, weights)
        scaler.step(torch.optim.SGD(weights, lr=0.1))
        scaler.update()
    assert (stepping.calls, updating.updates) == (1, 1)


def test_history_and_reports_of_a_subclass_with_its_own_step(weights: Any, run_backward: Any) -> None:
    scaler = OwnStep("cpu", init_scale=4.0, max_consecutive_skips=None)
    optimizer = torch.optim.SGD(weights, lr=0.1)
    for factor in (1.0, math.inf):
        optimizer.zero_grad()
        run_backward(scaler, weights, factor=factor)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.history == [ScaleRecord(1, 4.0, False), ScaleRecord(2, 4.0, True)]


def test_float16_hack_on_the_object(scaler: GradScaler) -> None:
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    real = scaler._unscale_grads_
    scaler._unscale_grads_ = lambda o, i, f, _: real(o, i, f, True)  # type: ignore[method-assign]
    scaler.scale(weight.sum()).backward()
    scaler.step(torch.optim.SGD([weight], lr=0.5))
    assert weight.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("how", ["stage", "state", "pop"])
def test_a_state_that_the_user_made_ready_again(how: str, scaler: GradScaler) -> None:
    """As two-step optimizers do with torch's scaler, which would refuse the second ``unscale_``."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    states = scaler._per_optimizer_states
    for factor in (3.0, 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.unscale_(optimizer)
        assert weight.grad is not None
        assert weight.grad.tolist() == [factor, factor]
        if factor == 3.0:
            if how == "stage":
                states[id(optimizer)]["stage"] = OptState.READY
            elif how == "state":
                states[id(optimizer)] = _refresh_per_optimizer_state()
            else:
                states.pop(id(optimizer))
    scaler.step(optimizer)
    assert weight.tolist() == [0.5, 0.5]


def test_scale_and_tracker_that_the_user_wrote(scaler: GradScaler, weights: Any, run_backward: Any) -> None:
    scaler._scale, scaler._growth_tracker = torch.tensor(8.0), torch.tensor(5, dtype=torch.int32)
    optimizer = torch.optim.SGD(weights, lr=0.5)
    run_backward(scaler, weights)
    scaler.step(optimizer)
    scaler.update()
    assert weights[0].tolist() == [0.5] * 3
    assert scaler.state_dict() == {**GradScaler("cpu").state_dict(), "scale": 8.0, "_growth_tracker": 6}
