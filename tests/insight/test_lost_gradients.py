"""Gradients that are off because values on the way became too small are named: all of them, and no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import mpamp
from mpamp import find_overflow
from mpamp.insight.overflow import OverflowFinder

Loss = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    """One head whose keys have a bias of their own: its gradient is zero, but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


class Branches(nn.Module):
    """Two heads of which the second's gradients are far smaller: most of one tensor's norm isn't what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.body(x))
        return torch.cat([self.first(h), self.second(h)], 1) * torch.tensor([1.0] * 4 + [1e-6] * 4)


class Words(nn.Module):
    """Most rows of the embedding are unused: zeros of float32's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))


def _squares(y: Tensor) -> Tensor:
    return y.float().square().mean()


def _next_word(y: Tensor) -> Tensor:
    return functional.cross_entropy(y.float().flatten(0, 1), torch.arange(len(y) * len(y[0])) % 64)


def _cases() -> dict[str, tuple[nn.Module, Tensor, Loss]]:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.ReLU())]
    pixels = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, bias=False),
        nn.Flatten(),
        nn.Linear(256, 3),
    )
    return {
        "layers": (nn.Sequential(*layers, nn.Linear(16, 4)), torch.randn(8, 16), _squares),
        "pixels": (pixels, torch.randn(4, 3, 12, 12), _squares),
        "attention": (nn.Sequential(Attention(), nn.Linear(16, 4)), torch.randn(2, 8, 16), _squares),
        "branches": (Branches(), torch.randn(8, 8), _squares),
        "words": (Words(), torch.randint(0, 16, (2, 8)), _next_word),
    }


ROUNDING = {"pixels": {"0.bias"}, "attention": {"0.k.bias"}}
"""Parameters whose gradients are rounding and nothing else, in float32 too."""


def _gradients(model: nn.Module, x: Tensor, loss: Loss, dtype: torch.dtype) -> dict[str, Tensor]:
    params = dict(model.named_parameters())
    with mpamp.autocast("cpu", dtype):
        value = loss(model(x))
    return dict(zip(params, torch.autograd.grad(value, list(params.values())), strict=True))


@pytest.mark.parametrize("factor", [1.0, 1e-4, 1e-6, 1e-8])
@pytest.mark.parametrize("name", _cases())
def test_named_gradients_are_off_and_others_are_not_and_the_scale_keeps_them(name: str, factor: float) -> None:
    model, x, of = _cases()[name]

    def loss(y: Tensor) -> Tensor:
        return of(y) * factor

    def found(scale: float) -> OverflowFinder:
        scaler = mpamp.GradScaler("cpu", init_scale=scale)
        return find_overflow(model, x, loss=loss, region=mpamp.autocast("cpu", torch.float16), scaler=scaler)

    first = found(1.0).first
    named = {} if first is None else {lost.parameter: lost for lost in first.underflows}
    low = _gradients(model, x, loss, torch.float16)
    wide = _gradients(model, x, loss, torch.float32)
    off = {key: float((low[key].double() - wide[key]).norm() / wide[key].double().norm()) for key in low}
    rounding = ROUNDING.get(name, set())
    assert not rounding & set(named)
    assert {key: off[key] for key in named if off[key] < 0.08} == {}
    assert {key: off[key] for key in off if off[key] > 0.13 and key not in named and key not in rounding} == {}
    hopeless = {key for key, lost in named.items() if lost.scale_to_keep is None}
    assert (hopeless == set()) is (name != "branches")  # their ranges are further apart than float16 is wide
    for scale in {lost.scale_to_keep for lost in named.values()} - {None}:
        left = found(scale).first
        assert {u.parameter for u in (() if left is None else left.underflows)} == hopeless


@pytest.mark.parametrize("name", ROUNDING)
def test_in_a_loop_a_gradient_that_is_all_rounding_is_not_named_either(name: str) -> None:
    model, x, loss = _cases()[name]
    with find_overflow(model) as finder:
        with mpamp.autocast("cpu", torch.float16):
            value = loss(model(x)) * 1e-6
        value.backward()
    assert finder.first is not None
    assert finder.first.underflows
    assert not ROUNDING[name] & {lost.parameter for lost in finder.first.underflows}


def test_a_bias_before_an_instance_norm_has_no_gradient_to_lose() -> None:
    """Few terms, whose rounding adds up to more than their norm's share."""
    torch.manual_seed(13)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3), nn.Conv2d(3, 2, 1))
    x = torch.randn(2, 2, 4, 4)
    with find_overflow(model) as finder:
        with mpamp.autocast("cpu", torch.float16):
            value = _squares(model(x)) * 1e-4
        value.backward()
    assert "0.bias" not in {lost.parameter for report in finder.reports for lost in report.underflows}


def test_a_loop_names_the_same_without_a_scale() -> None:
    model, x, loss = _cases()["layers"]
    once = find_overflow(model, x, loss=lambda y: loss(y) * 1e-6, region=mpamp.autocast("cpu", torch.float16)).first
    with find_overflow(model) as finder:
        with mpamp.autocast("cpu", torch.float16):
            value = loss(model(x)) * 1e-6
        value.backward()
    assert once is not None
    assert finder.first is not None
    assert [(u.parameter, u.share) for u in finder.first.underflows] == [
        (u.parameter, u.share) for u in once.underflows
    ]
    assert {(u.scale_to_keep, u.largest_scale) for u in finder.first.underflows} == {(None, None)}
    assert "a larger scale may keep it" in str(finder)


def test_what_is_added_up_in_place_is_followed() -> None:
    """Autograd adds the parts of a gradient up in the first one's memory, views of it included."""
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)

    def loss(y: Tensor) -> Tensor:
        return (y[:, :4] + y[:, 4:] * y[:, 1:5] + y[0, 0]).float().sum() * 1e-8

    first = find_overflow(layer, x, loss=loss, region=mpamp.autocast("cpu", torch.float16)).first
    assert first is not None
    assert {u.parameter: round(u.share, 2) for u in first.underflows} == {"weight": 1.0, "bias": 1.0}


def test_a_checkpoint_loses_what_is_lost_without() -> None:
    from torch.utils.checkpoint import checkpoint

    class Saved(nn.Module):
        def __init__(self, saves: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head, self.saves = nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Linear(8, 2), saves

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.body, x, use_reentrant=False) if self.saves else self.body(x))

    x = torch.randn(4, 8)
    found = [
        find_overflow(
            Saved(saves), x, loss=lambda y: y.float().mean() * 1e-6, region=mpamp.autocast("cpu", torch.float16)
        )
        for saves in (False, True)
    ]
    plain, saved = ([(u.parameter, u.share, u.scale_to_keep) for u in f.reports[0].underflows] for f in found)
    assert plain
    assert saved == plain
