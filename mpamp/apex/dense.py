"""apex.mlp and apex.fused_dense: linear layers in a row, over torch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import AmpTypeError

__all__ = ["DenseNoBias", "FusedDense", "FusedDenseGeluDense", "MLP"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda x: x, "relu": F.relu, "sigmoid": torch.sigmoid}


class MLP(nn.Module):
    """Linear layers, each with the activation behind it, the last one too.

    Args:
        mlp_sizes: Features, from the input's to the output's.
        bias: Whether layers have a bias.
        activation: "none", "relu" or "sigmoid".
        relu: The old form: False is "none".

    Raises:
        AmpTypeError: Another activation.

    Example:
        >>> MLP([4, 8, 2])(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """

    def __init__(
        self, mlp_sizes: Sequence[int], bias: bool = True, activation: str = "relu", *, relu: bool | None = None
    ) -> None:
        super().__init__()
        if relu is not None:
            activation = "relu" if relu else "none"
        if activation not in _ACTIVATIONS:
            raise AmpTypeError(f"activation is one of {', '.join(_ACTIVATIONS)}; got {activation!r}.")
        self.mlp_sizes, self.bias, self.activation = list(mlp_sizes), int(bias), activation
        self.num_layers = len(self.mlp_sizes) - 1
        for number in range(self.num_layers):
            rows, columns = self.mlp_sizes[number + 1], self.mlp_sizes[number]
            self.register_parameter(f"weight_{number}", nn.Parameter(torch.empty(rows, columns)))
            if bias:
                self.register_parameter(f"bias_{number}", nn.Parameter(torch.empty(rows)))
        self.reset_parameters()

    @property
    def weights(self) -> list[Tensor]:
        """The layers' weights, each (out, in)."""
        return [getattr(self, f"weight_{number}") for number in range(self.num_layers)]

    @property
    def biases(self) -> list[Tensor]:
        """The layers' biases, each (out,); none without ``bias``."""
        return [getattr(self, f"bias_{number}") for number in range(self.num_layers)] if self.bias else []

    def reset_parameters(self) -> None:
        """Draw new weights and biases, as apex does."""
        for weight in self.weights:
            nn.init.normal_(weight, 0.0, math.sqrt(2.0 / sum(weight.shape)))
        for bias in self.biases:
            nn.init.normal_(bias, 0.0, math.sqrt(1.0 / bias.numel()))

    def forward(self, input: Tensor) -> Tensor:
        """Return the layers' output: (batch, in) -> (batch, out)."""
        activation = _ACTIVATIONS[self.activation]
        biases: Sequence[Tensor | None] = self.biases or [None] * self.num_layers
        for weight, bias in zip(self.weights, biases, strict=True):
            input = activation(F.linear(input, weight, bias))
        return input

    def extra_repr(self) -> str:
        """Return what ``repr`` shows."""
        return f"MLP sizes: {self.mlp_sizes}, Bias={self.bias}, activation={self.activation}"


class FusedDense(nn.Linear):
    """torch's linear layer.

    Example:
        >>> FusedDense(4, 2)(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)


class DenseNoBias(nn.Linear):
    """torch's linear layer without a bias.

    Example:
        >>> DenseNoBias(4, 2).bias is None
        True
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, False)


class FusedDenseGeluDense(nn.Module):
    """Two linear layers with GELU, by the tanh formula, between them.

    Args:
        in_features: The input's features.
        intermediate_features: Features between the layers.
        out_features: The output's features.
        bias: True; apex has no other.

    Raises:
        AmpTypeError: ``bias=False``.

    Example:
        >>> FusedDenseGeluDense(4, 8, 2)(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """

    def __init__(self, in_features: int, intermediate_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        if not bias:
            raise AmpTypeError("FusedDenseGeluDense has no bias=False: use torch's Linear, GELU and Linear.")
        first, second = nn.Linear(in_features, intermediate_features), nn.Linear(intermediate_features, out_features)
        self.weight1, self.bias1, self.weight2, self.bias2 = first.weight, first.bias, second.weight, second.bias

    def forward(self, input: Tensor) -> Tensor:
        """Return the layers' output: (..., in) -> (..., out)."""
        hidden = F.gelu(F.linear(input, self.weight1, self.bias1), approximate="tanh")
        return F.linear(hidden, self.weight2, self.bias2)
