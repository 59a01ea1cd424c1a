"""Models with one fault each, and clean ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MaskedAttention(nn.Module):
    """Scores with a mask of -1e9, of which one row masks everything: harmless in float32, NaN in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.softmax = Softmax()

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        mask = torch.zeros(x.shape[1], x.shape[1], device=x.device)
        mask[0] = -1e9
        return self.softmax(scores.float() + mask) @ x


class Softmax(nn.Module):
    def forward(self, scores: Tensor) -> Tensor:
        return torch.softmax(scores, -1)


class Block(nn.Module):
    """Attention that is masked with -inf, a norm and a feed-forward part, as they should be."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.norm, self.out = nn.Linear(width, 3 * width), nn.LayerNorm(width), nn.Linear(width, width)
        self.ff = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / 4
        future = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device), 1)
        x = x + self.out(torch.softmax(scores.masked_fill(future, float("-inf")), -1) @ v)
        return x + self.ff(x)


class Words(nn.Module):
    """An embedding, some blocks and a head."""

    def __init__(self, width: int = 16, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = nn.Linear(width, 20)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(words)))


class TinySlope(nn.Module):
    """An embedding behind a layer whose weights make its gradient too small for float16, and no other's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 8)
        self.narrow = nn.Linear(8, 8)
        nn.init.constant_(self.narrow.weight, 1e-7)

    def forward(self, words: Tensor) -> Tensor:
        return self.narrow(self.embedding(words)).float()


def words(device: str = "cpu") -> Tensor:
    return torch.arange(12, device=device).reshape(2, 6) % 6


def next_word(logits: Tensor) -> Tensor:
    targets = torch.arange(logits.shape[0] * logits.shape[1], device=logits.device) % 20
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets)
