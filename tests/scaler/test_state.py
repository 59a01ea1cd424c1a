"""The scale's rule, without a device and against torch's kernel."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpamp.errors import MpampError, ScalerSettingError
from mpamp.scaler import ScaleState
from mpamp.scaler.kernels import Rule, _update_scale_, update_scale_

outcomes = st.lists(st.booleans(), max_size=40)
growths = st.floats(1.0, 1e6) | st.sampled_from([1.0, 2.0, 1.1, 2.0**10])
backoffs = st.floats(1e-6, 1.0) | st.sampled_from([1.0, 0.5, 0.3])
scales = st.floats(2.0**-100, 2.0**120) | st.sampled_from([1.0, 2.0**16, 2.0**120])
states = st.builds(
    ScaleState,
    scale=scales,
    growth_factor=growths,
    backoff_factor=backoffs,
    growth_interval=st.integers(1, 5),
    min_scale=st.just(2.0**-110) | st.just(2.0**-100),
    max_scale=st.just(2.0**126) | st.just(2.0**120),
)


@given(states, outcomes)
@settings(max_examples=300, deadline=None)
def test_next_is_torchs_kernel_within_bounds(state: ScaleState, found: list[bool]) -> None:
    scale, tracker = torch.tensor(state.scale), torch.tensor(state.growth_tracker, dtype=torch.int32)
    assert scale.item() == state.scale
    for found_inf in found:
        torch._amp_update_scale_(
            scale,
            tracker,
            torch.tensor(float(found_inf)),
            state.growth_factor,
            state.backoff_factor,
            state.growth_interval,
        )
        scale.clamp_(state.min_scale, state.max_scale)
        state = state.next(found_inf)
        assert (state.scale, state.growth_tracker) == (scale.item(), tracker.item())


@given(states, outcomes)
@settings(max_examples=200, deadline=None)
def test_scale_stays_within_bounds_and_tracker_below_interval(state: ScaleState, found: list[bool]) -> None:
    for found_inf in found:
        before, state = state, state.next(found_inf)
        assert state.min_scale <= state.scale <= state.max_scale
        assert 0 < state.scale < math.inf
        assert 0 <= state.growth_tracker < state.growth_interval
        assert state.scale <= before.scale if found_inf else state.scale >= before.scale


@given(
    st.sampled_from([2.0, 4.0, 1.5, 2.0**10]),
    st.sampled_from([0.5, 0.25]),
    st.integers(1, 4),
    outcomes,
    st.integers(-14, 120),
)
@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("has_kernel", [True, False])
def test_device_update_is_next(
    has_kernel: bool, growth: float, backoff: float, interval: int, found: list[bool], exponent: int
) -> None:
    state = ScaleState(2.0**exponent, 0, growth, backoff, interval)
    rule = Rule(growth, backoff, interval, state.min_scale, state.max_scale)
    scale, tracker = torch.tensor(state.scale), torch.tensor(0, dtype=torch.int32)
    for found_inf in found:
        if has_kernel:
            update_scale_(scale, tracker, torch.tensor(float(found_inf)), rule)
        else:
            _update_scale_(scale, tracker, torch.tensor(float(found_inf)), rule)
            scale.clamp_(rule.min_scale, rule.max_scale)
        state = state.next(found_inf)
        assert (scale.item(), tracker.item()) == (state.scale, state.growth_tracker)


def test_state_is_a_value() -> None:
    state = ScaleState(8.0)
    assert state.next(True) == ScaleState(4.0)
    assert state == ScaleState(8.0)
    with pytest.raises(AttributeError):
        state.scale = 3.0  # type: ignore[misc]


def test_scale_is_rounded_to_float32() -> None:
    assert ScaleState(0.1).scale == torch.tensor(0.1).item() != 0.1


def test_growth_that_would_overflow_leaves_the_scale() -> None:
    state = ScaleState(2.0**120, growth_factor=2.0**10, growth_interval=1)
    assert state.next(False).scale == 2.0**120


def test_tracker_past_the_interval_grows_after_the_next_update() -> None:
    state = ScaleState(2.0, growth_tracker=50, growth_interval=10)
    assert state.growth_tracker == 9
    assert state.next(False) == ScaleState(4.0, growth_interval=10)


BAD_NUMBERS = [0, 0.0, -1.0, math.nan, math.inf, -math.inf, "2", None, True, [2.0], torch.tensor(2.0), 1j]


@pytest.mark.parametrize("value", BAD_NUMBERS, ids=repr)
@pytest.mark.parametrize("name", ["scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"])
def test_bad_number_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        ScaleState(**{name: value})
    assert isinstance(caught.value, MpampError)


@pytest.mark.parametrize("value", [*BAD_NUMBERS, 2.5, 2**31], ids=repr)
def test_bad_interval_is_named(value: Any) -> None:
    with pytest.raises(ScalerSettingError, match="growth_interval"):
        ScaleState(growth_interval=value)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"growth_factor": 0.5}, "growth_factor"),
        ({"backoff_factor": 1.5}, "backoff_factor"),
        ({"growth_tracker": -1}, "growth_tracker"),
        ({"scale": 1e-45}, "scale"),
        ({"scale": 1e39}, "scale"),
        ({"min_scale": 1e-40}, "min_scale"),
        ({"min_scale": 4.0, "max_scale": 2.0}, "min_scale"),
        ({"scale": 1.0, "min_scale": 2.0}, "scale"),
        ({"scale": 8.0, "max_scale": 4.0}, "scale"),
    ],
    ids=str,
)
def test_values_out_of_range_are_named(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(ScalerSettingError, match=name):
        ScaleState(**arguments)
