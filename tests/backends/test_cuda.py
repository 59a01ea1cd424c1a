"""What CUDA alone has: cuDNN's recurrent layers, whose kernel in torch casts to float16 whatever was asked for."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import mpamp
from mpamp.testing import WeightCastCounter

BRAIN, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
LAYERS = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
OPTIONS: list[dict[str, Any]] = [{}, {"bidirectional": True, "num_layers": 2}, {"bias": False, "batch_first": True}]
on_cuda = pytest.mark.place("cuda")


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.rand(3, 4, 5, device="cuda")


def outputs(result: Any) -> list[torch.Tensor]:
    """Return a recurrent layer's output and hidden states."""
    output, hidden = result
    return [output, *(hidden if isinstance(hidden, tuple) else (hidden,))]


@on_cuda
@pytest.mark.parametrize("dtype", [BRAIN, HALF])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_recurrent_layer_runs_in_the_region_s_dtype(
    x: torch.Tensor, kind: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    layer = LAYERS[kind](5, 7, **options).cuda()
    expected = outputs(layer(x))
    with mpamp.autocast("cuda", dtype), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = outputs(layer(x))
    assert [t.dtype for t in found] == [dtype] * len(expected)
    for ours, single in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.float(), single, rtol=2e-2, atol=2e-2)


@on_cuda
@pytest.mark.parametrize("kind", LAYERS)
def test_its_gradients_are_float32_and_near_float32_s(x: torch.Tensor, kind: str) -> None:
    layer = LAYERS[kind](5, 7).cuda()
    layer(x)[0].sum().backward()
    expected = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    with mpamp.autocast("cuda", BRAIN):
        layer(x)[0].sum().backward()
    for parameter, single in zip(layer.parameters(), expected, strict=True):
        assert parameter.grad.dtype is FULL
        torch.testing.assert_close(parameter.grad, single, rtol=5e-2, atol=5e-2)


@on_cuda
@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_its_weights_and_their_buffer_are_cast_at_each_call(x: torch.Tensor, dtype: torch.dtype) -> None:
    """Its weights are parts of one buffer, whose owner may write into them unseen: no cast of such is kept."""
    layer = nn.LSTM(5, 7).cuda()
    with WeightCastCounter(layer) as casts, mpamp.autocast("cuda", dtype):
        for _ in range(3):
            layer(x)
    assert casts.count == 3 * (4 + 1)


@on_cuda
def test_float16_is_what_torch_gives(x: torch.Tensor) -> None:
    layer = nn.LSTM(5, 7).cuda()
    with torch.autocast("cuda", HALF):
        expected = outputs(layer(x))
    with mpamp.autocast("cuda", HALF):
        for ours, torchs in zip(outputs(layer(x)), expected, strict=True):
            assert torch.equal(ours, torchs)


@on_cuda
def test_weights_that_lie_apart_are_served(x: torch.Tensor) -> None:
    layer = nn.GRU(5, 7).cuda()
    expected = layer(x)[0]
    layer.weight_hh_l0 = nn.Parameter(layer.weight_hh_l0.clone())
    with mpamp.autocast("cuda", BRAIN):
        found = layer(x)[0]
    assert found.dtype is BRAIN
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


@on_cuda
@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_a_training_step_changes_what_the_next_forward_gives(x: torch.Tensor, dtype: torch.dtype) -> None:
    layer = nn.LSTM(5, 7).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    region = mpamp.autocast("cuda", dtype, persistent_cache=True)
    with region:
        first = layer(x)[0]
    first.sum().backward()
    optimizer.step()
    with region:
        second = layer(x)[0]
    with torch.no_grad():
        torch.testing.assert_close(second.float(), layer(x)[0], rtol=2e-2, atol=2e-2)
    assert not torch.allclose(first, second, atol=1e-2)
