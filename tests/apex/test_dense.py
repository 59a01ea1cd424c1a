"""apex.mlp and apex.fused_dense against layers of torch's in a row."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mpamp.apex import amp
from mpamp.apex.dense import MLP, DenseNoBias, FusedDense, FusedDenseGeluDense
from mpamp.apex.errors import AmpTypeError
from mpamp.apex.normalization import FusedLayerNorm

ACTIVATIONS = {"none": nn.Identity, "relu": nn.ReLU, "sigmoid": nn.Sigmoid}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_mlp(activation, bias):
    mlp = MLP([4, 6, 2], bias=bias, activation=activation)
    layers = []
    for number in range(2):
        linear = nn.Linear(*mlp.mlp_sizes[number : number + 2], bias=bias)
        linear.weight = mlp.weights[number]
        if bias:
            linear.bias = mlp.biases[number]
        layers += [linear, ACTIVATIONS[activation]()]
    x = torch.randn(3, 4)
    torch.testing.assert_close(mlp(x), nn.Sequential(*layers)(x))
    names = ["weight_0", "bias_0", "weight_1", "bias_1"] if bias else ["weight_0", "weight_1"]
    assert [name for name, _ in mlp.named_parameters()] == names
    assert f"activation={activation}" in repr(mlp)


def test_mlps_old_argument_and_another_activation():
    assert MLP([2, 2], relu=False).activation == "none"
    assert MLP([2, 2], relu=True).activation == "relu"
    with pytest.raises(AmpTypeError, match="sigmoid"):
        MLP([2, 2], activation="tanh")


def test_mlp_starts_as_apexs():
    torch.manual_seed(0)
    mlp = MLP([200, 300])
    assert mlp.weights[0].std().item() == pytest.approx((2 / 500) ** 0.5, rel=0.05)
    assert mlp.biases[0].std().item() == pytest.approx((1 / 300) ** 0.5, rel=0.15)


def test_o1_casts_mlps():
    model = MLP([4, 2])
    amp.initialize(model, opt_level="O4", verbosity=0)
    assert model(torch.ones(1, 4)).dtype is torch.bfloat16


def test_dense():
    x = torch.randn(2, 3, 4)
    dense = FusedDense(4, 5)
    torch.testing.assert_close(dense(x), x @ dense.weight.T + dense.bias)
    assert FusedDense(4, 5, bias=False).bias is DenseNoBias(4, 5).bias is None
    both = FusedDenseGeluDense(4, 6, 5)
    hidden = nn.functional.gelu(x @ both.weight1.T + both.bias1, approximate="tanh")
    torch.testing.assert_close(both(x), hidden @ both.weight2.T + both.bias2)
    assert len(list(both.parameters())) == 4
    with pytest.raises(AmpTypeError, match="bias"):
        FusedDenseGeluDense(4, 6, 5, bias=False)


def test_layers_of_apexs_take_float32_where_another_method_than_forward_calls_them():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.norm, self.head = FusedDense(4, 4), FusedLayerNorm(4), MLP([4, 2])

        def encode(self, x):
            return self.head(self.norm(self.body(x)))

        def forward(self, x):
            return self.encode(x)

    model = Model()
    wanted = model(torch.ones(1, 4)).detach()
    amp.initialize(model, opt_level="O5", verbosity=0)
    found = model.encode(torch.ones(1, 4))
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, rtol=0.05, atol=0.05)
