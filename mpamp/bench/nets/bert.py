"""BERT (Devlin et al. 2018, https://arxiv.org/abs/1810.04805) with its head for masked tokens."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

__all__ = ["Bert"]


class BertLayer(nn.Module):
    """Attention and a feed-forward net, each before a layer norm: [n, t, dim] -> the same."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.proj, self.norm_1 = nn.Linear(dim, dim), nn.LayerNorm(dim)
        self.up, self.down, self.norm_2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim), nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        x = self.norm_1(x + self.proj(mixed))
        return self.norm_2(x + self.down(functional.gelu(self.up(x))))  # type: ignore[no-any-return]


class Bert(nn.Module):
    """Tokens [n, t] in int64 to logits [n, t, vocabulary]; the default is BERT-base, 110 million parameters."""

    def __init__(
        self, layers: int = 12, dim: int = 768, heads: int = 12, vocabulary: int = 30522, context: int = 512
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(context, dim)
        self.norm = nn.LayerNorm(dim)
        self.layers = nn.Sequential(*(BertLayer(dim, heads) for _ in range(layers)))
        self.transform, self.transform_norm = nn.Linear(dim, dim), nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary)
        self.head.weight = self.tokens.weight
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.layers(self.norm(self.tokens(tokens) + self.places(places)))
        return self.head(self.transform_norm(functional.gelu(self.transform(x))))  # type: ignore[no-any-return]
