"""Loss scales that are named were run: they do what is said of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mpamp
from mpamp import find_overflow
from mpamp.insight.overflow_report import StepReport, Underflow
from mpamp.insight.scale_search import Backward, with_scales


class Range:
    """A backward pass whose one gradient fits below 2**high, and is kept from 2**low on."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        self.ran: list[float] = []

    def __call__(self, scale: float) -> dict[str, Tensor]:
        self.ran.append(scale)
        value = torch.inf if scale > 2.0**self.high else scale if scale >= 2.0**self.low else 0.0
        return {"weight": torch.tensor([value])}


def _report(scale: float) -> StepReport:
    return StepReport(1, None, (), (Underflow("weight", 1.0, "linear", "", scale, {}),), scale)


@pytest.mark.parametrize(("low", "high"), [(0, 0), (3, 3), (1, 40), (-20, 5), (17, 100), (-50, -20), (5, 200)])
@pytest.mark.parametrize("began", [1.0, 2.0**16, 1000.0, 2.0**-12])
def test_the_least_and_the_largest_are_found_and_were_run(low: int, high: int, began: float) -> None:
    run = Range(low, high)
    report = with_scales(_report(began), Backward(run, {"weight": torch.tensor([began])}, began), 0.1)
    (lost,) = report.underflows
    assert lost.largest_scale == 2.0 ** min(high, 120)
    assert lost.scale_to_keep is not None
    assert lost.scale_to_keep <= lost.largest_scale
    assert {lost.scale_to_keep, lost.largest_scale} <= set(run.ran)
    assert lost.scale_to_keep >= 2.0**low
    assert len(run.ran) < 30


def test_where_none_fits_or_none_keeps_no_scale_is_named() -> None:
    (never,) = with_scales(_report(1.0), Backward(Range(0, -90), {"weight": torch.ones(1)}, 1.0), 0.1).underflows
    assert (never.scale_to_keep, never.largest_scale) == (None, None)
    (lost,) = with_scales(_report(1.0), Backward(Range(50, 10), {"weight": torch.ones(1)}, 1.0), 0.1).underflows
    assert (lost.scale_to_keep, lost.largest_scale) == (None, 2.0**10)
    assert "no scale keeps it (1024 is the most that fits)" in str(lost)


@pytest.mark.parametrize("slope", [3e4, 3e6, 3e9])
def test_a_scale_that_fits_fits(slope: float) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4)

    def found(scale: float) -> StepReport | None:
        region, scaler = mpamp.autocast("cpu", torch.float16), mpamp.GradScaler("cpu", init_scale=scale)
        loss = lambda y: y.float().sum() * slope  # noqa: E731
        return find_overflow(model, x, loss=loss, region=region, scaler=scaler, least_share=None).first

    first = found(2.0**16)
    assert first is not None
    assert first.overflow is not None
    fits = first.overflow.fitting_scale
    assert fits is not None
    assert f"a loss scale of at most {fits:g}" in first.overflow.advice or fits >= 2.0**17
    assert found(fits) is None
    assert found(2 * fits) is not None


def test_of_an_overflow_in_the_forward_pass_none_is_named() -> None:
    layer = nn.Linear(4, 4)
    first = find_overflow(
        layer, torch.full((2, 4), 1e7), loss=lambda y: y.float().sum(), region=mpamp.autocast("cpu", torch.float16)
    ).first
    assert first is not None
    assert first.overflow is not None
    assert first.overflow.fitting_scale is None
    assert "scale" not in first.overflow.advice


def test_gradients_and_random_numbers_are_left() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)), torch.randn(2, 4)
    find_overflow(model, x, loss=lambda y: y.float().mean() * 1e-8, region=mpamp.autocast("cpu", torch.float16))
    assert all(param.grad is None for param in model.parameters())
