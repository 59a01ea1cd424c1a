"""Loops that go against mixed precision are told what to do, and clean ones aren't."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import mpamp
from mpamp.insight import reporting
from mpamp.insight.report.report import Advice

Scaler = Callable[..., Any]
SCALERS = [mpamp.GradScaler, torch.amp.GradScaler]


def _loss(model: nn.Module, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    with mpamp.autocast("cpu", dtype):
        return model(torch.ones(4, 8)).float().square().mean()


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=1e-2)


def _advice(run: Callable[[], object]) -> list[Advice]:
    with reporting(None) as seen:
        run()
    assert seen.report is not None
    return [one for one in seen.report.advice if one.rank <= 1]


# -- Clips ---------------------------------------------------------------------------------------------


def _by_norm(model: nn.Module) -> None:
    clip_grad_norm_(model.parameters(), 1.0)  # imported before anybody looked; given a generator


def _by_name(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(list(model.parameters()), max_norm=1.0)


def _by_value(model: nn.Module) -> None:
    clip_grad_value_(model.parameters(), clip_value=0.5)


def _of_one(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(next(model.parameters()), 1.0)


def _measured(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), float("inf"))


CLIPS = [_by_norm, _by_name, _by_value, _of_one]


def _scaled(make: Scaler, clip: Callable[[nn.Module], None], unscales: bool, scale: float = 1024.0) -> None:
    model, optimizer = _model()
    scaler = make("cpu", init_scale=scale)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(_loss(model)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        clip(model)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("make", SCALERS)
def test_a_clip_of_scaled_gradients_is_found(make: Scaler, clip: Callable[[nn.Module], None]) -> None:
    (one,) = _advice(lambda: _scaled(make, clip, unscales=False))
    assert "clipped gradients that were still scaled" in one.title
    assert "1024" in one.why
    assert one.do.startswith("scaler.unscale_(optimizer)")


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("make", SCALERS)
def test_a_clip_after_unscale_is_none(make: Scaler, clip: Callable[[nn.Module], None]) -> None:
    assert _advice(lambda: _scaled(make, clip, unscales=True)) == []


def test_a_clip_that_only_measures_or_with_a_scale_of_1_is_none() -> None:
    assert _advice(lambda: _scaled(mpamp.GradScaler, _measured, unscales=False)) == []
    assert _advice(lambda: _scaled(mpamp.GradScaler, _by_norm, unscales=False, scale=1.0)) == []


def test_a_clip_after_a_scalers_own_way_to_unscale_is_none() -> None:
    class Own(torch.amp.GradScaler):
        def unscale_(self, optimizer: Any) -> None:
            inverse = torch.full((), 1 / self.get_scale())
            found = self._unscale_grads_(optimizer, inverse, torch.zeros(()), False)
            state = self._per_optimizer_states[id(optimizer)]
            state["found_inf_per_device"] = found
            state["stage"] = torch.amp.grad_scaler.OptState.UNSCALED

    assert _advice(lambda: _scaled(Own, _by_norm, unscales=True)) == []


def test_of_two_optimizers_each_has_its_own_clip() -> None:
    def run() -> None:
        (one, first), (other, second) = _model(), _model()
        scaler = mpamp.GradScaler("cpu", init_scale=512.0)
        for _ in range(2):
            scaler.scale(_loss(one) + _loss(other)).backward()
            scaler.unscale_(first)
            clip_grad_norm_(one.parameters(), 1.0)
            scaler.step(first)
            scaler.unscale_(second)
            clip_grad_norm_(other.parameters(), 1.0)
            scaler.step(second)
            scaler.update()

    assert _advice(run) == []


# -- Regions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("region", [mpamp.autocast, torch.autocast])
def test_a_loop_in_one_region_is_told_to_end_it(region: Any) -> None:
    def run() -> None:
        model, optimizer = _model()
        with region("cpu", dtype=torch.bfloat16):
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(4, 8)).float().square().mean().backward()
                optimizer.step()

    (one,) = [one for one in _advice(run) if "region is around" in one.title]
    assert one.why.startswith("3 backward passes and 3 optimizer steps ran in a region")
    assert "before backward()" in one.do


def test_a_backward_pass_in_a_region_is_found_by_itself() -> None:
    def run() -> None:
        model, optimizer = _model()
        for _ in range(2):
            with mpamp.autocast("cpu", torch.bfloat16):
                model(torch.ones(4, 8)).float().mean().backward()
            optimizer.step()

    (one,) = _advice(run)
    assert one.why.startswith("2 backward passes ran in a region")


def test_clean_loops_are_told_nothing() -> None:
    from torch.utils.checkpoint import checkpoint

    def run() -> None:
        model, optimizer = _model()
        for reentrant in (False, True):
            optimizer.zero_grad()
            x = torch.ones(4, 8, requires_grad=True)
            with mpamp.autocast("cpu", torch.bfloat16):
                loss = checkpoint(model, x, use_reentrant=reentrant).float().square().mean()
            loss.backward()
            with mpamp.autocast("cpu", torch.bfloat16, enabled=False):
                optimizer.step()

    assert _advice(run) == []


# -- Weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_lower_precision_are_found(dtype: torch.dtype) -> None:
    def run() -> None:
        model, _ = _model()
        model.to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
        for _ in range(2):
            _loss(model, dtype).backward()
            optimizer.step()

    titles = {one.title: one.do for one in _advice(run)}
    name = str(dtype).removeprefix("torch.")
    assert "weights in float32" in titles[f"An optimizer updates weights in {name}: small updates are lost"]


def test_weights_in_float16_beside_a_scaler_are_found_though_it_raises() -> None:
    def run() -> None:
        model, optimizer = _model()
        model.half()
        scaler = mpamp.GradScaler("cpu")
        scaler.scale(_loss(model)).backward()
        with pytest.raises(ValueError, match=r"FP16|float16"):
            scaler.step(optimizer)

    assert "An optimizer updates weights in float16: small updates are lost" in {one.title for one in _advice(run)}


def test_low_weights_that_are_frozen_or_have_masters_are_none() -> None:
    def frozen() -> None:
        model, _ = _model()
        model[0].to(torch.bfloat16).requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        _loss(model, torch.bfloat16).backward()
        optimizer.step()

    def masters() -> None:
        model, _ = _model()
        model.to(torch.bfloat16)
        copies = [p.detach().float().requires_grad_() for p in model.parameters()]
        optimizer = torch.optim.SGD(copies, lr=1e-2)
        _loss(model, torch.bfloat16).backward()
        for copy, param in zip(copies, model.parameters(), strict=True):
            copy.grad = None if param.grad is None else param.grad.float()
        optimizer.step()

    def inference() -> None:
        model, _ = _model()
        _loss(model.to(torch.bfloat16), torch.bfloat16)

    for run in (frozen, masters, inference):
        assert _advice(run) == []
