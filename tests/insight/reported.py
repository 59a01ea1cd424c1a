"""Training loops for reports, and what may be read of a page without a browser."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import torch
from torch import nn

import mpamp

HALF = torch.float16


class Steep(nn.Module):
    """Its head's gradients overflow in float16 from a loss scale of 2**11 on, and not below."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def slope(y: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradient is 40 at each of the head's outputs."""
    return (y.float() * 40.0).sum()


def train(steps: int = 6, init_scale: float = 2.0**13, scaler: Any = None) -> tuple[Steep, Any, list[float]]:
    """Train a few steps in float16; return the model, the scaler and the losses."""
    torch.manual_seed(0)
    model = Steep()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = mpamp.GradScaler("cpu", init_scale=init_scale) if scaler is None else scaler
    losses = []
    for _ in range(steps):
        with mpamp.autocast("cpu", dtype=HALF):
            loss = slope(model(torch.ones(1, 4)))
        losses.append(loss.item())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return model, scaler, losses


class Page(HTMLParser):
    """What a page holds: its tags with their attributes, its ids, its text, and the data of its tree."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.rows: dict[str, Any] = {}
        self._data = ""
        self.feed(text)
        self.close()
        assert self.open == []
        self.text = re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "br", "path"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            if self.tags[-1][1].get("type") == "application/json":
                self.rows = json.loads(data)
        elif self.open[-1:] != ["style"]:
            self.words.append(data)
