"""Rules that explain gives were tried: who follows them casts less, and the finding is gone."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import mpamp
from mpamp.insight.records import Finding

BRAIN = torch.bfloat16


class Scaled(nn.Module):
    """A product times a float32 parameter."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.linear, self.gamma = nn.Linear(size, size), nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.gamma


class Wide(nn.Module):
    """Products of float32 that no rule is to narrow: its ``mul`` is as it should be."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float() * x.float().abs()


class Gate(nn.Module):
    """A tiny product beside large ones."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.large = nn.Linear(4, 1), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.large(x) * torch.sigmoid(self.gate(x[:4, :4].contiguous())).mean()


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(64, 64), norm, nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)))


MODELS: dict[str, tuple[nn.Module, dict[str, str]]] = {
    "one float32 argument": (nn.Sequential(Scaled(), nn.Linear(64, 64)), {}),
    "beside a wide one": (nn.Sequential(Scaled(), nn.Linear(64, 64), Wide()), {}),
    "a tiny op": (Gate(), {}),
    "a tiny op alone": (nn.Sequential(nn.Linear(4, 4)), {}),
    "a norm by a rule": (Normed(nn.LayerNorm(64)), {"layer_norm": "fp32"}),
    "gelu by a rule": (Normed(nn.GELU()), {"gelu": "fp32"}),
    "scaled twice": (nn.Sequential(Scaled(), Scaled(), Wide(), Scaled()), {}),
    "tiny in three": (nn.Sequential(Gate(), nn.Linear(64, 64), Gate(), nn.Linear(64, 64), Gate()), {}),
}


def _explained(model: nn.Module, finding: Finding | None, ops: dict[str, str]) -> Any:
    x = torch.randn(4, 4) if model is MODELS["a tiny op alone"][0] else torch.randn(64, 64)
    with ExitStack() as stack:
        if finding is not None and finding.module_rules:
            stack.enter_context(mpamp.module_rules(model, finding.module_rules))
        elif finding is not None:
            ops = {**ops, **finding.ops}
        stack.enter_context(mpamp.autocast("cpu", BRAIN, ops=ops or None))
        return mpamp.explain(model, x)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_rule_that_is_given_casts_less_and_mends_what_was_found(name: str) -> None:
    model, ops = MODELS[name]
    seen = _explained(model, None, ops)
    assert seen.findings
    given = [finding for finding in seen.findings if finding.ops or finding.module_rules]
    for finding in given:
        assert "(tried)" in finding.advice
        assert not (finding.ops and finding.module_rules)
        after = _explained(model, finding, ops)
        assert after.cast_bytes < seen.cast_bytes
        left = {module for f in after.findings if (f.kind, f.op) == (finding.kind, finding.op) for module in f.modules}
        assert not left & set(finding.modules)
    for finding in seen.findings:
        assert finding in given or "ops={" not in finding.advice


def test_a_local_fault_gets_a_rule_of_its_modules() -> None:
    model, ops = MODELS["scaled twice"]
    (finding,) = [f for f in _explained(model, None, ops).findings if f.kind == "one float32 argument"]
    assert finding.ops == {}
    assert finding.module_rules == {name: {"mul": "lower_precision_fp"} for name in ("0", "1", "3")}
    (tiny,) = [f for f in _explained(*_two(MODELS["a tiny op"])).findings if f.kind == "tiny op"]
    assert tiny.module_rules == {"gate": {"linear": "fp32"}}


def _two(case: tuple[nn.Module, dict[str, str]]) -> tuple[nn.Module, None, dict[str, str]]:
    return case[0], None, case[1]


def test_a_fault_of_all_that_use_the_op_gets_a_rule_of_the_region() -> None:
    seen = _explained(*_two(MODELS["a norm by a rule"]))
    (finding,) = seen.findings
    assert (finding.ops, finding.module_rules) == ({"layer_norm": "fallthrough"}, {})


def test_where_no_rule_casts_less_none_is_given() -> None:
    class Once(nn.Module):
        """The rule would cast a large stream of float32, to save one of a small one."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.gamma = nn.Linear(64, 64), nn.Parameter(torch.ones(64))
            self.register_buffer("stream", torch.ones(256, 256))

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x) * self.gamma
            return functional.layer_norm((self.stream * self.stream).sum() * y, (64,))

    with mpamp.autocast("cpu", BRAIN):
        seen = mpamp.explain(Once(), torch.randn(64, 64))
    (finding,) = [f for f in seen.findings if f.kind == "one float32 argument"]
    assert (finding.ops, finding.module_rules) == ({}, {})
    assert "No rule that was tried mends it" in finding.advice


def test_weights_buffers_and_rules_are_left() -> None:
    model = nn.Sequential(Scaled(), nn.BatchNorm1d(64), Wide())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with mpamp.autocast("cpu", BRAIN):
        assert mpamp.explain(model, torch.randn(64, 64)).findings
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all("forward" not in vars(module) for module in model.modules())
