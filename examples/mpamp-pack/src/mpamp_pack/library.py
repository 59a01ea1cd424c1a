"""The ops, of any device: each is made of torch's own."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["entropy", "join", "scores"]

_library = torch.library.Library("mpamp_pack", "DEF")
_library.define("scores(Tensor query, Tensor key, float scale) -> Tensor")
_library.define("entropy(Tensor logits) -> Tensor")
_library.define("join(Tensor[] parts) -> Tensor")


def _scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    return query @ key.mT * scale


def _entropy(logits: Tensor) -> Tensor:
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def _join(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])


for _name, _function in {"scores": _scores, "entropy": _entropy, "join": _join}.items():
    _library.impl(_name, _function, "CompositeImplicitAutograd")

scores = torch.ops.mpamp_pack.scores
"""Attention scores: query (..., n, d) and key (..., m, d) give (..., n, m)."""
entropy = torch.ops.mpamp_pack.entropy
"""The entropy of each row of logits (..., n), in nats, of shape (...)."""
join = torch.ops.mpamp_pack.join
"""All elements of some tensors, in one dimension."""
