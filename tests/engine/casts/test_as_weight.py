"""Where no gradients are recorded, a kept cast wants some as its weight does: ``matmul`` goes by that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import linear

import mpamp
from mpamp.engine.casts.cache import PERSISTENT_CACHE

BF16 = torch.bfloat16


def products(call: Any) -> set[str]:
    """Return which products ran; a dispatch mode would be given casts of its own."""
    with torch.autograd.profiler.profile() as profile:
        call()
    return {event.name for event in profile.function_events} & {"aten::mm", "aten::bmm"}


@pytest.mark.parametrize("is_persistent", [False, True])
@pytest.mark.parametrize("is_trainable", [False, True])
def test_products_are_those_of_a_model_in_lower_precision(is_trainable: bool, is_persistent: bool) -> None:
    weight = torch.nn.Parameter(torch.randn(8, 8), requires_grad=is_trainable)
    low = torch.nn.Parameter(weight.detach().to(BF16), requires_grad=is_trainable)
    x = torch.randn(4, 3, 8).transpose(0, 1)
    with torch.no_grad():
        wanted = products(lambda: linear(x.to(BF16), low))
        with mpamp.autocast("cpu", BF16, persistent_cache=is_persistent):
            assert [products(lambda: linear(x, weight)) for _ in range(3)] == [wanted] * 3
            assert not linear(x, weight).requires_grad
    mpamp.clear_cache()


def test_gradients_go_to_the_weight_alone() -> None:
    weight, x = torch.nn.Parameter(torch.randn(4, 4)), torch.randn(2, 4)
    with mpamp.autocast("cpu", BF16, persistent_cache=True):
        with torch.no_grad():
            linear(x, weight)
            kept = PERSISTENT_CACHE.find(weight, BF16)
        y = linear(x, weight)
    assert kept is not None
    assert kept.requires_grad
    assert y.requires_grad
    y.float().sum().backward()
    assert kept.grad is None
    assert weight.grad is not None
    weight.requires_grad_(False)
    with mpamp.autocast("cpu", BF16, persistent_cache=True):
        assert not linear(x, weight).requires_grad
    weight.requires_grad_(True)
    with mpamp.autocast("cpu", BF16, persistent_cache=True), torch.inference_mode():
        assert torch.equal(linear(x, weight), linear(x.to(BF16), weight.detach().to(BF16)))
    mpamp.clear_cache()


def test_a_step_after_an_evaluation_writes_the_cast_in_place() -> None:
    weight, x = torch.nn.Parameter(torch.randn(4, 4)), torch.randn(2, 4, requires_grad=True)
    optimizer, places = torch.optim.SGD([weight], 0.1), []
    for _ in range(3):
        with mpamp.autocast("cpu", BF16, persistent_cache=True):
            with torch.no_grad():
                seen = linear(x, weight)
            y = linear(x, weight)
        assert torch.equal(seen, linear(x.to(BF16), weight.detach().to(BF16)))
        saved: Any = y.grad_fn
        places.append(saved._saved_mat2.data_ptr())  # the cast's, without a tensor that Python would hold
        optimizer.zero_grad()
        y.float().sum().backward()
        del y, saved
        optimizer.step()
    assert len(set(places)) == 1
    mpamp.clear_cache()
