"""Saving, loading and pickling."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch

from mpamp.errors import MpampError, MpampWarning, ScalerStateError, ScalerUsageError
from mpamp.scaler import GradScaler

TORCH_KEYS = ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]


def trained(make: Any, weights: Any, run_backward: Any) -> Any:
    scaler = make("cpu", init_scale=64.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=7)
    optimizer = torch.optim.SGD(weights, lr=0.1)
    for factor in (math.inf, 1.0, 1.0):
        optimizer.zero_grad()
        run_backward(scaler, weights, factor=factor)
        scaler.step(optimizer)
        scaler.update()
    return scaler


def test_keys_are_torchs(weights: Any, run_backward: Any) -> None:
    ours = trained(GradScaler, weights, run_backward).state_dict()
    torchs = trained(torch.amp.GradScaler, weights, run_backward).state_dict()
    assert list(ours) == list(torchs) == TORCH_KEYS
    assert ours == torchs
    assert {key: type(value) for key, value in ours.items()} == {key: type(value) for key, value in torchs.items()}


@pytest.mark.parametrize("source", [torch.amp.GradScaler, GradScaler], ids=["torch's", "ours"])
@pytest.mark.parametrize("target", [torch.amp.GradScaler, GradScaler], ids=["torch's", "ours"])
@pytest.mark.parametrize("is_used", [False, True])
def test_round_trip_through_a_file(source: Any, target: Any, is_used: bool, weights: Any, run_backward: Any) -> None:
    file = io.BytesIO()
    state = trained(source, weights, run_backward).state_dict()
    torch.save(state, file)
    file.seek(0)
    scaler = target("cpu")
    if is_used:
        scaler.scale(torch.ones(()))
    scaler.load_state_dict(torch.load(file, weights_only=True))
    assert scaler.state_dict() == state
    assert scaler.scale(torch.ones(())).item() == state["scale"]


def test_scale_that_float32_rounds_is_loaded_in_silence(scaler: GradScaler) -> None:
    scaler.load_state_dict({**GOOD, "scale": 0.1})
    assert scaler.get_scale() == pytest.approx(0.1)


def test_apex_scale_out_of_bounds_is_moved_with_a_warning() -> None:
    scaler = GradScaler("cpu", min_scale=1.0)
    with pytest.warns(MpampWarning, match="out of"):
        scaler.load_state_dict({"loss_scaler0": {"loss_scale": 0.5, "unskipped": 7}})
    assert scaler.get_scale() == 1.0


def test_numbers_in_tensors_and_integers_are_taken(scaler: GradScaler) -> None:
    scaler.load_state_dict({**scaler.state_dict(), "scale": torch.tensor(8.0), "_growth_tracker": torch.tensor([3])})
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (8.0, 3)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 4})
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("is_used", [False, True])
def test_apex_state(is_used: bool, scaler: GradScaler) -> None:
    scaler.set_growth_interval(100)
    if is_used:
        scaler.scale(torch.ones(()))
    saved = {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 7}}
    scaler.load_state_dict(saved)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (65536.0, 7)
    assert scaler.get_growth_interval() == 100
    assert saved == {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 7}}


def test_apex_state_of_a_static_scale_counts_on_and_on(scaler: GradScaler) -> None:
    scaler.load_state_dict({"loss_scaler0": {"loss_scale": 128.0, "unskipped": 10**6}})
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (128.0, 1999)


def test_apex_state_of_several_losses(scaler: GradScaler) -> None:
    one, two = {"loss_scale": 8.0, "unskipped": 1}, {"loss_scale": 4.0, "unskipped": 1}
    scaler.load_state_dict({"loss_scaler0": one, "loss_scaler1": dict(one)})
    assert scaler.get_scale() == 8.0
    with pytest.raises(ScalerStateError, match=r'Choose the one.*"loss_scaler0": state\["loss_scaler1"\]'):
        scaler.load_state_dict({"loss_scaler0": one, "loss_scaler1": two})
    scaler.load_state_dict({"loss_scaler0": two})
    assert scaler.get_scale() == 4.0


GOOD = GradScaler("cpu").state_dict()
WRONG: dict[str, Any] = {
    "empty": {},
    "list": [1.0],
    "none": None,
    "optimizer's": {"state": {}, "param_groups": []},
    "model's": {"weight": torch.ones(2)},
    "no tracker": {key: GOOD[key] for key in TORCH_KEYS[:-1]},
    "scale 0": {**GOOD, "scale": 0.0},
    "scale nan": {**GOOD, "scale": math.nan},
    "scale inf": {**GOOD, "scale": math.inf},
    "scale negative": {**GOOD, "scale": -1.0},
    "scale str": {**GOOD, "scale": "65536"},
    "scale tensor": {**GOOD, "scale": torch.ones(2)},
    "growth below 1": {**GOOD, "growth_factor": 0.5},
    "backoff 0": {**GOOD, "backoff_factor": 0.0},
    "interval 0": {**GOOD, "growth_interval": 0},
    "interval float": {**GOOD, "growth_interval": 2.5},
    "tracker negative": {**GOOD, "_growth_tracker": -1},
    "tracker none": {**GOOD, "_growth_tracker": None},
    "apex without scale": {"loss_scaler0": {"unskipped": 3}},
    "apex nan": {"loss_scaler0": {"loss_scale": math.nan, "unskipped": 3}},
    "apex str": {"loss_scaler0": {"loss_scale": "dynamic", "unskipped": 3}},
}


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("saved", WRONG.values(), ids=WRONG)
def test_wrong_state_raises_and_changes_nothing(saved: Any, is_used: bool, scaler: GradScaler) -> None:
    scaler.set_growth_factor(3.0)
    if is_used:
        scaler.scale(torch.ones(()))
    before = scaler.state_dict()
    with pytest.raises(ScalerStateError) as caught:
        scaler.load_state_dict(saved)
    assert isinstance(caught.value, MpampError)
    assert isinstance(caught.value, RuntimeError)
    assert scaler.state_dict() == before


def test_empty_state_says_what_torch_says(scaler: GradScaler) -> None:
    with pytest.raises(RuntimeError, match="possibly because it was saved from a disabled instance of GradScaler"):
        scaler.load_state_dict({})


def test_scale_out_of_bounds_is_moved_with_a_warning() -> None:
    scaler = GradScaler("cpu", min_scale=1.0, max_scale=2.0**20)
    for saved, scale in ((2.0**-20, 1.0), (2.0**30, 2.0**20)):
        with pytest.warns(MpampWarning, match="out of") as caught:
            scaler.load_state_dict({**GOOD, "scale": saved})
        assert caught[0].filename == __file__
        assert scaler.get_scale() == scale


def test_tracker_past_the_interval_is_taken_as_due(weights: Any, run_backward: Any) -> None:
    scaler = GradScaler("cpu")
    scaler.load_state_dict({**GOOD, "scale": 2.0, "growth_interval": 3, "_growth_tracker": 50})
    optimizer = torch.optim.SGD(weights, lr=0.1)
    run_backward(scaler, weights)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_disabled_scaler_loads_nothing() -> None:
    scaler = GradScaler("cpu", enabled=False)
    scaler.load_state_dict({})
    scaler.load_state_dict(GOOD)
    assert scaler.get_scale() == 1.0


@pytest.mark.parametrize("duplicate", [lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy], ids=["pickle", "copy"])
def test_pickle_between_iterations(duplicate: Any, weights: Any, run_backward: Any) -> None:
    scaler = trained(GradScaler, weights, run_backward)
    other = duplicate(scaler)
    assert type(other) is GradScaler
    assert other.state_dict() == scaler.state_dict()
    optimizer = torch.optim.SGD(weights, lr=0.1)
    run_backward(other, weights, factor=math.inf)
    other.step(optimizer)
    other.update()
    assert other.last_step_skipped(optimizer)
    assert other.last_step(optimizer).step == 4
    assert other.get_scale() == scaler.get_scale() / 4


def test_pickle_of_a_disabled_scaler() -> None:
    assert not pickle.loads(pickle.dumps(GradScaler("cpu", enabled=False))).is_enabled()


@pytest.mark.parametrize("method", ["unscale_", "step"])
def test_pickle_in_mid_iteration_is_refused(method: str, scaler: GradScaler, weights: Any, run_backward: Any) -> None:
    run_backward(scaler, weights)
    getattr(scaler, method)(torch.optim.SGD(weights, lr=0.1))
    with pytest.raises(AssertionError, match="may only be pickled at the beginning of an iteration"):
        pickle.dumps(scaler)
    scaler.update()
    pickle.dumps(scaler)


def test_pickle_with_a_process_group_is_refused() -> None:
    scaler = GradScaler("cpu")
    scaler.process_group = object()
    with pytest.raises(ScalerUsageError, match="state_dict"):
        pickle.dumps(scaler)
