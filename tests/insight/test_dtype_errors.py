"""An error that comes of a region says where it is raised, by which op, and with which rule the model runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpamp

BRAIN = torch.bfloat16
Forward = Callable[["Write", Tensor], Tensor]


class Write(nn.Module):
    def __init__(self, run: Forward) -> None:
        super().__init__()
        self.proj, self.run = nn.Linear(8, 8), run
        self.register_buffer("buf", torch.zeros(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.head, self.blocks = nn.Linear(8, 8), nn.ModuleList([nn.Identity(), inner])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.head(x))


class Same(torch.autograd.Function):
    """Wants two tensors of one dtype, and says so in Python."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, w: Tensor) -> Tensor:
        if a.dtype is not w.dtype:
            raise RuntimeError("expected both to have the same dtype")
        return a @ w

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def _put(s: Write, x: Tensor) -> Tensor:
    b = s.buf.clone()
    b[torch.tensor([0, 1])] = s.proj(x)[:2]
    return b


WRITES: dict[str, Forward] = {
    "index_put_": _put,
    "scatter_add_": lambda s, x: s.buf.clone().scatter_add_(0, torch.zeros(4, 8, dtype=torch.long), s.proj(x)),
    "index_add_": lambda s, x: s.buf.clone().index_add_(0, torch.arange(4), s.proj(x)),
    "index_reduce_": lambda s, x: s.buf.clone().index_reduce_(0, torch.arange(4), s.proj(x), "amax"),
    "lerp_": lambda s, x: s.buf.clone().lerp_(s.proj(x), 0.5),
    "masked_scatter_": lambda s, x: s.buf.clone().masked_scatter_(torch.ones(4, 8, dtype=torch.bool), s.proj(x)),
}
OTHERS: dict[str, Forward] = {
    "a function": lambda s, x: Same.apply(s.proj(x), s.proj.weight),
    "numpy": lambda s, x: torch.from_numpy(s.proj(x).detach().numpy()),
    "an assertion": lambda s, x: x if s.proj(x).dtype is torch.float32 else _fail(),
}


def _fail() -> Tensor:
    raise AssertionError("float32 is wanted")


def _note(model: nn.Module, x: Tensor) -> str:
    with mpamp.autocast("cpu", BRAIN), pytest.raises(Exception) as raised:  # noqa: PT011 whatever torch raises
        mpamp.explain(model, x)
    notes = getattr(raised.value, "__notes__", [])
    return " ".join([str(raised.value), *notes])


def _rules(note: str) -> Any:
    found = re.search(r"(ops=|module_rules\(model, )(\{[^)]*\})\)", note)
    return None if found is None else (found[1] == "ops=", eval(found[2]))


def _runs_by(model: nn.Module, x: Tensor, rules: Any) -> None:
    is_ops, content = rules
    with mpamp.autocast("cpu", BRAIN, ops=content if is_ops else None):
        if is_ops:
            model(x)
        else:
            with mpamp.module_rules(model, content):
                model(x)


@pytest.mark.parametrize("name", WRITES)
def test_a_write_into_float32_is_told_the_rule_for_writes(name: str) -> None:
    model, x = Outer(Write(WRITES[name])), torch.randn(4, 8)
    note = _note(model, x)
    assert f"{name} in blocks.1 (Write), which was given float32 and bfloat16," in note
    assert _rules(note) == (True, {"@buffer_writes": "promote"})
    _runs_by(model, x, _rules(note))


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_told_a_rule_by_which_the_model_runs(name: str) -> None:
    model, x = Outer(Write(OTHERS[name])), torch.randn(4, 8)
    note = _note(model, x)
    assert "blocks.1 (Write)" in note
    is_ops, content = _rules(note)
    assert is_ops or set(content) == {"blocks.1"}
    _runs_by(model, x, (is_ops, content))


def test_what_is_wrong_without_a_region_too_gets_no_note() -> None:
    calls = []

    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            return x @ torch.ones(3, 3)

    with mpamp.autocast("cpu", BRAIN), pytest.raises(RuntimeError) as raised:
        mpamp.explain(Wrong(), torch.randn(4, 8))
    assert not getattr(raised.value, "__notes__", [])
    assert len(calls) == 2  # once more without autocast


def test_what_is_raised_once_gets_no_note() -> None:
    class Once(nn.Module):
        runs = 0

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            if self.runs == 1:
                raise UserWarning("only once")
            return x

    assert _note(Once(), torch.randn(4, 8)) == "only once"


def test_where_autocast_is_off_nothing_is_run_again() -> None:
    calls = []

    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            raise ValueError("no")

    with mpamp.autocast("cpu", BRAIN, enabled=False), pytest.raises(ValueError, match="no"):
        mpamp.explain(Wrong(), torch.randn(4, 8))
    assert len(calls) == 1


def test_where_no_rule_helps_that_is_said() -> None:
    class Stubborn(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if torch.is_autocast_enabled("cpu"):
                raise RuntimeError("not here")
            return x

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Stubborn()

        def forward(self, x: Tensor) -> Tensor:
            with mpamp.autocast("cpu", BRAIN, enabled=True):
                return self.inner.forward(x)  # of which no rule of a module is told

    class Switched(nn.Module):
        """Is right only the second time that it runs, without autocast."""

        def __init__(self) -> None:
            super().__init__()
            self.runs = 0

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            if self.runs != 2:
                raise RuntimeError("not here")
            return x

    assert "No rule of an op or a module mends it" in _note(Switched(), torch.randn(4, 8))
    with mpamp.autocast("cpu", BRAIN), pytest.raises(RuntimeError, match="not here"):
        mpamp.explain(Around(), torch.randn(4, 8))


def test_the_error_is_the_models_own_and_buffers_are_left() -> None:
    model = Write(_put)
    model.register_buffer("count", torch.zeros(()))

    def run(s: Write, x: Tensor) -> Tensor:
        s.count += 1
        return _put(s, x)

    model.run = run
    with mpamp.autocast("cpu", BRAIN), pytest.raises((RuntimeError, IndexError), match="Index put requires"):
        mpamp.explain(model, torch.randn(4, 8))
    assert model.count == 0
