"""GPT-2 (Radford et al. 2019), and low-rank adapters for it (LoRA, Hu et al. 2021)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

__all__ = ["GPT", "add_lora"]


class GPTBlock(nn.Module):
    """Causal attention and a feed-forward net, each after a layer norm: [n, t, dim] -> the same."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, dim = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(n, t, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(n, t, dim))
        return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Tokens [n, t] in int64 to logits [n, t, vocabulary]; the default is GPT-2 small, 124 million parameters."""

    def __init__(
        self, layers: int = 12, dim: int = 768, heads: int = 12, vocabulary: int = 50257, context: int = 1024
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(context, dim)
        self.blocks = nn.Sequential(*(GPTBlock(dim, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(places)
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


class LoRA(nn.Module):
    """A frozen linear layer and a trainable product of two small ones: [..., in] -> [..., out]."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def add_lora(model: GPT, rank: int = 8) -> GPT:
    """Freeze a model, and give each attention's two linear layers adapters to train."""
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "proj"):
            layer = getattr(block, name)
            setattr(block, name, LoRA(layer, rank))
    return model
