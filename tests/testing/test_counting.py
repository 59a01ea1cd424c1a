"""The counters, held against torch.autocast, whose own behaviour is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from mpamp.testing import KernelCounter, WeightCastCounter


def _autocast(**options: Any) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, **options)


@pytest.fixture
def layer() -> torch.nn.Linear:
    return torch.nn.Linear(8, 8, bias=False)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.ones(2, 8)


@pytest.mark.xfail(
    not hasattr(torch.library, "get_kernel"),
    reason="once mpamp's kernels are there, torch 2.8 casts at each use",
    strict=False,
)
def test_trainable_weight_is_cast_once_by_torch(layer: torch.nn.Linear, x: torch.Tensor) -> None:
    with WeightCastCounter(layer) as casts, _autocast():
        layer(layer(layer(x)))
    assert casts.count == 1


def test_frozen_weight_is_cast_at_each_use_by_torch(layer: torch.nn.Linear, x: torch.Tensor) -> None:
    layer.requires_grad_(False)
    with WeightCastCounter(layer) as casts, _autocast():
        layer(layer(layer(x)))
    assert casts.count == 3


@pytest.mark.parametrize("without_grad", [torch.no_grad, torch.inference_mode])
def test_casts_without_grad_are_seen(layer: torch.nn.Linear, x: torch.Tensor, without_grad: Any) -> None:
    with WeightCastCounter(layer) as casts, without_grad(), _autocast(cache_enabled=False):
        layer(layer(x))
    assert casts.count == 2


def test_a_weight_made_in_inference_mode_is_seen(x: torch.Tensor) -> None:
    with torch.inference_mode():
        layer = torch.nn.Linear(8, 8, bias=False)
        with WeightCastCounter(layer) as casts, _autocast():
            layer(x)
    assert casts.count == 1


def test_weight_and_bias_both_count(x: torch.Tensor) -> None:
    with WeightCastCounter(torch.nn.Linear(8, 8)) as unrelated, _autocast():
        layer = torch.nn.Linear(8, 8)
        with WeightCastCounter(layer) as casts:
            layer(x)
    assert (casts.count, unrelated.count) == (2, 0)


def test_only_the_given_parameters_count(x: torch.Tensor) -> None:
    watched, other = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    with WeightCastCounter([watched.weight]) as casts, _autocast():
        other(watched(x))
    assert casts.count == 1


def test_no_region_no_casts(layer: torch.nn.Linear, x: torch.Tensor) -> None:
    with WeightCastCounter(layer) as casts:
        layer(x).sum().backward()
    assert casts.count == 0


def test_casts_of_gradients_do_not_count(layer: torch.nn.Linear, x: torch.Tensor) -> None:
    with WeightCastCounter(layer) as casts:
        with _autocast():
            loss = layer(x).float().sum()
        loss.backward()
    assert layer.weight.grad is not None
    assert casts.count == 1


def test_recomputation_casts_again(layer: torch.nn.Linear, x: torch.Tensor) -> None:
    with WeightCastCounter(layer) as casts:
        with _autocast():
            loss = checkpoint(layer, x, use_reentrant=False).float().sum()
        assert casts.count == 1
        loss.backward()
    assert casts.count == 2


def test_a_slice_of_a_weight_counts_as_the_weight(layer: torch.nn.Linear, x: torch.Tensor) -> None:
    with WeightCastCounter(layer) as casts, _autocast():
        for part in layer.weight.chunk(2):
            linear(x, part)
    assert casts.count == 2


@pytest.mark.parametrize("target", [torch.float32, torch.float64, torch.int8, torch.complex64])
def test_a_cast_to_what_is_not_a_smaller_float_does_not_count(layer: torch.nn.Linear, target: torch.dtype) -> None:
    with WeightCastCounter(layer) as casts:
        layer.weight.detach().to(target, copy=True)
    assert casts.count == 0


def test_a_copy_into_a_lower_precision_buffer_counts(layer: torch.nn.Linear) -> None:
    low, same = layer.weight.detach().bfloat16(), layer.weight.detach().clone()
    with WeightCastCounter(layer) as casts, torch.no_grad():
        low.copy_(layer.weight)
        same.copy_(layer.weight)
        torch._foreach_copy_([low, same], [layer.weight, layer.weight])
        layer.weight.copy_(low)
    assert casts.count == 2


def test_a_weight_with_new_data_is_still_watched(layer: torch.nn.Linear) -> None:
    with WeightCastCounter(layer) as casts:
        layer.weight.data = torch.zeros(8, 8)
        layer.weight.bfloat16()
    assert casts.count == 1


def test_sparse_and_meta_tensors_are_told_apart() -> None:
    weight, other = (torch.nn.Parameter(torch.ones(2, 2, device="meta")) for _ in range(2))
    sparse = torch.eye(2).to_sparse()
    with WeightCastCounter([weight]) as casts, torch.no_grad():
        sparse.bfloat16()
        other.bfloat16()
        weight.bfloat16()
    assert casts.count == 1


def test_count_goes_on_over_entries(layer: torch.nn.Linear, x: torch.Tensor) -> None:
    casts = WeightCastCounter(layer)
    for expected in (1, 2):
        with casts, _autocast():
            layer(x)
        assert casts.count == expected


def test_the_counted_code_computes_the_same(layer: torch.nn.Linear, x: torch.Tensor) -> None:
    with _autocast():
        plain = layer(x)
        with WeightCastCounter(layer), KernelCounter():
            counted = layer(x)
    torch.testing.assert_close(counted, plain, rtol=0, atol=0)


def test_kernels_are_counted_by_overload(x: torch.Tensor) -> None:
    with KernelCounter() as kernels:
        x.sum()
        x.sum(dim=1)
        x.sum(dim=1)
    assert kernels.counts == {"aten::sum": 1, "aten::sum.dim_IntList": 2}
    assert kernels.total == 3


def test_kernels_of_the_backward_pass_are_counted(layer: torch.nn.Linear, x: torch.Tensor) -> None:
    with KernelCounter() as forward:
        loss = layer(x).sum()
    with KernelCounter() as backward:
        loss.backward()
    assert forward.counts["aten::mm"] == 1
    assert backward.counts["aten::mm"] == 1
