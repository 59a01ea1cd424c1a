"""Small models of the usual kinds, and one with a fault of each kind planted in it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

Tensor = torch.Tensor


class Block(nn.Module):
    """A residual block of ResNet-18."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.down = nn.Conv2d(inner, outer, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.down(x))


class ResNet(nn.Module):
    """ResNet-18's layout, in fewer channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        sizes = [(16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 64, 2), (64, 64, 1)]
        self.blocks = nn.Sequential(*(Block(*size) for size in sizes))
        self.head = nn.Linear(64, 100)

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(functional.relu(self.bn(self.stem(x))))
        return self.head(y.mean((2, 3)))


class Attention(nn.Module):
    """Attention and a perceptron, before each a norm, around each a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, 2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A small GPT."""

    def __init__(self, layers: int = 2, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, width), nn.Embedding(16, width)
        self.layers = nn.ModuleList(Attention(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    """An LSTM and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(48, 64, batch_first=True)
        self.head = nn.Linear(64, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


class Faulty(nn.Module):
    """One fault of each kind; its region gives layer_norm an ``fp32`` rule."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)
        self.frozen = torch.randn(64, 64)
        self.gamma = nn.Parameter(torch.ones(64))
        self.gate = nn.Linear(16, 2)
        self.register_buffer("scale", torch.ones(64, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.second(functional.relu(self.norm(self.first(x)))))
        y = functional.linear(y, self.frozen) * self.gamma
        gate = self.gate(x[:2, :16])
        return (y * self.scale).float() + gate.sum()


RULES = {"layer_norm": "fp32"}


def clean() -> dict[str, tuple[nn.Module, Tensor]]:
    """Return models without a fault, each with an input."""
    torch.manual_seed(0)
    return {
        "resnet": (ResNet(), torch.randn(4, 3, 32, 32)),
        "transformer": (Transformer(), torch.randint(50, (8, 16))),
        "lstm": (Recurrent(), torch.randn(8, 12, 48)),
    }
