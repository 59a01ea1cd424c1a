"""Planted overflows, as data: a model's forward pass, what is to be blamed, and whether a rule can mend it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

HALF, BRAIN = torch.float16, torch.bfloat16
BOTH = (HALF, BRAIN)
INF = float("inf")


class Planted(NamedTuple):
    """A model with a fault in the module named ``fault``, between two layers.

    Attributes:
        function: What the faulty module does.
        op: What is to be blamed; a word of the advice where it is data.
        dtypes: The regions in which it overflows.
        says: A word of the advice where no rule helps; empty where one does.
        ops: Rules of the region.
        loss: Makes the loss.
    """

    function: Callable[[Tensor], Tensor]
    op: str
    dtypes: tuple[torch.dtype, ...] = (HALF,)
    says: str = ""
    ops: dict[str, str] | None = None
    loss: Callable[[Tensor], Tensor] = lambda y: y.float().mean()


class Fault(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.fault, self.last = nn.Linear(16, 16), Fault(function), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.fault(self.first(x)))


def _ratio(y: Tensor) -> Tensor:
    return y / y.abs().sum().clamp(min=1)


def _masked(y: Tensor) -> Tensor:
    return y.masked_fill(torch.ones_like(y, dtype=torch.bool), -INF)


def _huge(y: Tensor) -> Tensor:
    return torch.tanh(y).abs() + 5.0


def _norm_by_hand(y: Tensor) -> Tensor:
    return torch.sqrt((y * 0).square().sum(-1, keepdim=True)) + y


LOW = "lower_precision_fp"
PLANTED: dict[str, Planted] = {
    # A lower dtype's range: a rule helps.
    "product": Planted(lambda y: (y * 1e6) / 1e6, "mul"),
    "sum": Planted(lambda y: (_huge(y) * 1e4).sum(-1, keepdim=True) / 1e6 + y, "sum", ops={"sum": LOW}),
    "square": Planted(lambda y: (_huge(y) * 100).square() / 1e6, "square", ops={"square": LOW}),
    "power": Planted(lambda y: (_huge(y) * 100).pow(2) / 1e6, "pow", ops={"pow": LOW}),
    "exponential": Planted(lambda y: _ratio(torch.exp(_huge(y) + 8)), "exp", ops={"exp": LOW}),
    "matrix product": Planted(lambda y: (_huge(y) * 100) @ (_huge(y) * 100).T @ y / 1e7, "matmul"),
    "softmax of rows of -1e9": Planted(lambda y: torch.softmax(y.float() - 1e9, -1), "softmax", ops={"softmax": LOW}),
    "mean of squares": Planted(
        lambda y: y * torch.log1p((_huge(y) * 1e3).square().mean(-1, keepdim=True)), "square", ops={"square": LOW}
    ),
    "norm": Planted(
        lambda y: y * torch.linalg.vector_norm(_huge(y) * 1e4, dim=-1, keepdim=True) / 1e6,
        "linalg_vector_norm",
        ops={"linalg_vector_norm": LOW},
    ),
    "cumulative sum": Planted(lambda y: _ratio((_huge(y) * 3e3).cumsum(-1)), "cumsum", ops={"cumsum": LOW}),
    "lost epsilon": Planted(lambda y: y / ((y * 0).std(-1, keepdim=True) + 1e-9) * 1e-9, "div"),
    "lost epsilon of a mean": Planted(lambda y: y / ((y * 0).mean(-1, keepdim=True) + 1e-8) / 1e8, "div"),
    "small divisor": Planted(lambda y: (y + 4) / 1e-5 * 1e-6, "div"),
    "reciprocal": Planted(lambda y: torch.reciprocal(y * 0 + 1e-5) / 1e6, "reciprocal", ops={"reciprocal": LOW}),
    "added up": Planted(lambda y: (_huge(y) * 1e4 + _huge(y) * 1e4) / 1e6, "add"),
    "subtracted": Planted(lambda y: (_huge(y) * -1e4 - _huge(y) * 1e4) / 1e6, "sub"),
    "variance": Planted(lambda y: y * (y * 1e3).var(-1, keepdim=True) / 1e6, "var", ops={"var": LOW}),
    "logarithm of a lost probability": Planted(lambda y: torch.log(y * 0 + 1e-9) / 100, "log", ops={"log": LOW}),
    "addcmul": Planted(lambda y: torch.addcmul(y, _huge(y) * 1e3, _huge(y) * 1e3) / 1e7, "addcmul"),
    "batch product": Planted(lambda y: torch.bmm(_huge(y)[None] * 1e3, _huge(y).T[None] * 1e3)[0] @ y / 1e9, "bmm"),
    # float32 gives it too: none helps.
    "x / 0": Planted(lambda y: y / (y - y), "div", BOTH, "divisor is 0 at index"),
    "x / a row of 0": Planted(lambda y: y / torch.relu(y - 100).sum(-1, keepdim=True), "div", BOTH, "divisor is 0"),
    "0 / 0": Planted(lambda y: (y * 0) / (y * 0), "div", BOTH, "divisor is 0"),
    "log of 0": Planted(lambda y: torch.log(torch.relu(y)), "log", BOTH, "taken of 0 at index"),
    "log of a negative": Planted(lambda y: torch.log(-y.abs() - 1), "log", BOTH, "taken of a negative"),
    "sqrt of a negative": Planted(lambda y: torch.sqrt(-y.abs() - 1), "sqrt", BOTH, "taken of a negative"),
    "rsqrt of 0": Planted(lambda y: torch.rsqrt(y * 0), "rsqrt", BOTH, "taken of 0"),
    "reciprocal of 0": Planted(lambda y: torch.reciprocal(y * 0), "reciprocal", BOTH, "taken of 0"),
    "row of -inf": Planted(lambda y: torch.softmax(_masked(y), -1), "softmax", BOTH, "row is -inf only"),
    "row of -inf in a log_softmax": Planted(
        lambda y: functional.log_softmax(_masked(y), -1), "log_softmax", BOTH, "-inf"
    ),
    "0 * inf": Planted(lambda y: (y * 0) * torch.exp(y * 0 + 1000), "exp", BOTH, "too large"),
    "inf - inf": Planted(lambda y: torch.exp(y * 0 + 1000) - torch.exp(y * 0 + 900), "exp", BOTH, "too large"),
    "exp of 1000": Planted(lambda y: torch.exp(y + 1000), "exp", BOTH, "too large for float32"),
    "acos of 2": Planted(lambda y: torch.acos(y.abs() + 2), "acos", BOTH, "outside of -1 to 1"),
    "power of a negative": Planted(lambda y: (-y.abs() - 1).pow(0.5), "pow", BOTH, "negative value with a fraction"),
    "variance of one value": Planted(lambda y: y * y[:1].var(0, keepdim=True), "var", BOTH, "one value only"),
    "mean of nothing": Planted(lambda y: y * y[:0].mean(), "mean", BOTH, "of no values"),
    "all targets ignored": Planted(
        lambda y: y,
        "cross_entropy_loss",
        BOTH,
        "targets are ignored",
        loss=lambda y: functional.cross_entropy(y, torch.full((4,), -100)),
    ),
    "gradient of a norm of 0": Planted(_norm_by_hand, "sqrt", BOTH, "divisor is 0"),
    "gradient of a root of 0": Planted(lambda y: torch.sqrt(y * y * 0) + y, "sqrt", BOTH, "divisor is 0"),
    # No rule decides it.
    "a cast in the code": Planted(lambda y: (y.float() * 1e6).half().float() / 1e6, "to", BOTH, "a cast in the code"),
    "a cast of another kind": Planted(lambda y: (y.float() * 1e6).to(HALF).float() / 1e6, "to", BOTH, "a cast in the"),
}


def inputs() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 16)


def model(planted: Planted) -> Model:
    torch.manual_seed(1)
    return Model(planted.function)


def cases() -> list[Any]:
    """Return names with dtypes: all float16 ones, and of the bfloat16 ones each fifth; the rest are a sweep."""
    pairs = [(name, dtype) for name, planted in PLANTED.items() for dtype in planted.dtypes]
    brain = [pair for pair in pairs if pair[1] is BRAIN]
    names = {pair: f"{pair[0]}, {str(pair[1]).removeprefix('torch.')}" for pair in pairs}
    rare = brain[::5]
    return [
        pytest.param(*pair, id=names[pair], marks=pytest.mark.sweep if pair in brain and pair not in rare else ())
        for pair in pairs
    ]
