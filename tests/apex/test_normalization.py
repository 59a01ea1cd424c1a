"""apex.normalization: values by the formulas in float64, dtypes by apex's rules, gradients through both."""

from __future__ import annotations

import pytest
import torch

import mpamp
from mpamp.apex import normalization as norms
from mpamp.apex.errors import AmpUsageError

X = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(1)) * 2 + 1


def layer_norm(x, dims, eps, weight=None, bias=None):
    x = x.double()
    mean = x.mean(dims, keepdim=True)
    out = (x - mean) / ((x - mean).square().mean(dims, keepdim=True) + eps).sqrt()
    return out if weight is None else out * weight.double() + bias.double()


def rms_norm(x, dims, eps, weight=None):
    x = x.double()
    out = x / (x.square().mean(dims, keepdim=True) + eps).sqrt()
    return out if weight is None else out * weight.double()


def filled(layer):
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.linspace(0.5, 1.5, p.numel()).view(p.shape))
    return layer


CASES = [(6, (-1,)), ((3, 6), (-2, -1))]


@pytest.mark.parametrize(("shape", "dims"), CASES)
@pytest.mark.parametrize("affine", [True, False])
def test_layers_in_float32(shape, dims, affine):
    layer = filled(norms.FusedLayerNorm(shape, eps=1e-2, elementwise_affine=affine, memory_efficient=True))
    rms = filled(norms.FusedRMSNorm(shape, eps=1e-2, elementwise_affine=affine))
    wanted = layer_norm(X, dims, 1e-2, layer.weight, layer.bias)
    torch.testing.assert_close(layer(X).double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rms(X).double(), rms_norm(X, dims, 1e-2, rms.weight), rtol=1e-5, atol=1e-5)
    assert len(list(layer.parameters())) == (2 if affine else 0)
    assert isinstance(layer, torch.nn.LayerNorm)
    assert (norms.FusedLayerNorm(2).eps, norms.FusedRMSNorm(2).eps) == (1e-5, 1e-5)


@pytest.mark.parametrize(("shape", "dims"), CASES)
def test_functions(shape, dims):
    weight = torch.linspace(0.5, 1.5, 6 if shape == 6 else 18).view(shape)
    bias = weight - 1
    found = norms.fused_layer_norm_affine(X, weight, bias, shape)
    torch.testing.assert_close(found.double(), layer_norm(X, dims, 1e-6, weight, bias), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norms.fused_layer_norm(X, shape).double(), layer_norm(X, dims, 1e-6), atol=1e-5, rtol=0)
    found = norms.fused_rms_norm_affine(X, weight, shape)
    torch.testing.assert_close(found.double(), rms_norm(X, dims, 1e-6, weight), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norms.fused_rms_norm(X, shape).double(), rms_norm(X, dims, 1e-6), atol=1e-5, rtol=0)
    sizes = (shape,) if isinstance(shape, int) else shape
    found = norms.manual_rms_norm(X, sizes, weight, 1e-6)
    torch.testing.assert_close(found.double(), rms_norm(X, dims, 1e-6, weight), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weights", ["low", "float32"])
def test_dtypes(low, weights):
    layers = [norms.FusedLayerNorm(6), norms.FusedRMSNorm(6), norms.MixedFusedLayerNorm(6), norms.MixedFusedRMSNorm(6)]
    for layer in map(filled, layers):
        if weights == "low":
            layer.to(low)
        of_low, of_wide = layer(X.to(low)), layer(X)
        mixed = "Mixed" in type(layer).__name__
        own = low if weights == "low" else torch.float32
        assert (of_low.dtype, of_wide.dtype) == ((own, own) if mixed else (low, torch.float32))
        x = X.to(low)
        if "RMS" in type(layer).__name__:
            wanted = rms_norm(x, (-1,), 1e-5, layer.weight)
        else:
            wanted = layer_norm(x, -1, 1e-5, layer.weight, layer.bias)
        torch.testing.assert_close(of_low.double(), wanted, rtol=0.02, atol=0.02)


def test_gradients_reach_weights_of_another_dtype():
    layer = filled(norms.FusedLayerNorm(6))
    x = X.bfloat16().requires_grad_(True)
    layer(x).float().square().sum().backward()
    assert (x.grad.dtype, layer.weight.grad.dtype) == (torch.bfloat16, torch.float32)
    other = filled(norms.FusedLayerNorm(6))
    y = X.bfloat16().float().requires_grad_(True)
    other(y).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, other.weight.grad, rtol=0.02, atol=0.5)
    torch.testing.assert_close(x.grad.float(), y.grad, rtol=0.05, atol=0.1)


def test_manual_rms_norm_of_lower_precision():
    weight = torch.ones(6, dtype=torch.bfloat16)
    assert norms.manual_rms_norm(X.bfloat16(), (6,), weight, 1e-6).dtype is torch.bfloat16
    assert norms.manual_rms_norm(X.bfloat16(), (6,), None, 1e-6).dtype is torch.float32
    assert norms.manual_rms_norm(X.bfloat16(), (6,), weight.float(), 1e-6).dtype is torch.float32


def test_mixed_layers_have_weights():
    for cls in (norms.MixedFusedLayerNorm, norms.MixedFusedRMSNorm):
        with pytest.raises(AmpUsageError, match="elementwise_affine"):
            cls(2, elementwise_affine=False)
        with pytest.raises(AmpUsageError, match="sequence_parallel"):
            cls(2, sequence_parallel_enabled=True)
        assert cls(2, eps=0.5, elementwise_affine=True, memory_efficient=True).memory_efficient is True


def test_a_region_decides_as_for_torchs_layer():
    layer, plain = norms.FusedLayerNorm(6), torch.nn.LayerNorm(6)
    for dtype in (torch.bfloat16, torch.float16):
        with mpamp.autocast("cpu", dtype):
            assert layer(X.to(dtype)).dtype is plain(X.to(dtype)).dtype
