"""Each planted fault is named, with what would change it; models without one get none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

import mpamp
from mpamp.insight.records import Finding
from mpamp.insight.tracing import Trace

from .models import RULES, Faulty, clean

BRAIN = torch.bfloat16


def _only(seen: Trace) -> Finding:
    (finding,) = seen.findings
    return finding


def test_every_planted_fault_is_named() -> None:
    with mpamp.autocast("cpu", BRAIN, ops=RULES):
        seen = mpamp.explain(Faulty(), torch.randn(32, 64))
    found = {f.kind: (f.op, f.modules, f.ops or f.module_rules, f.is_shipped) for f in seen.findings}
    assert found == {
        "round trip": ("aten::layer_norm", ("second",), {"layer_norm": "fallthrough"}, False),
        "weight cast at every call": ("aten::linear", ("Faulty",), {}, False),
        "tiny op": ("aten::linear", ("gate",), {"gate": {"linear": "fp32"}}, False),
        "one float32 argument": ("aten::mul.Tensor", ("Faulty",), {}, False),  # a rule would cast more
        "float64": ("aten::mul.Tensor", ("Faulty",), {}, False),
    }
    texts = {f.kind: f.text for f in seen.findings}
    assert "frozen is cast" in texts["weight cast at every call"]
    assert "plain tensor" in texts["weight cast at every call"]
    assert "gamma" in texts["one float32 argument"]
    assert "scale" in texts["float64"]


def test_what_is_advised_takes_the_fault_away() -> None:
    model, x = Faulty(), torch.randn(32, 64)
    with mpamp.autocast("cpu", BRAIN, ops=RULES):
        seen = mpamp.explain(model, x)
    rules = {op: policy for f in seen.findings for op, policy in f.ops.items()}
    modules = {name: rule for f in seen.findings for name, rule in f.module_rules.items()}
    model.frozen = torch.nn.Parameter(model.frozen, requires_grad=False)
    model.scale = model.scale.to(BRAIN)
    model.gamma = torch.nn.Parameter(model.gamma.to(BRAIN))
    with mpamp.module_rules(model, modules), mpamp.autocast("cpu", BRAIN, ops={**RULES, **rules}):
        assert mpamp.explain(model, x).findings == ()


@pytest.mark.parametrize("kind", ["resnet", "transformer", "lstm"])
@pytest.mark.parametrize("grad", [True, False])
def test_a_clean_model_has_no_findings(kind: str, grad: bool) -> None:
    model, x = clean()[kind]
    with torch.set_grad_enabled(grad), mpamp.autocast("cpu", BRAIN):
        assert mpamp.explain(model, x).findings == ()


def test_training_has_no_findings() -> None:
    model, x = clean()["transformer"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mpamp.trace() as seen:
        for _ in range(3):
            with mpamp.autocast("cpu", BRAIN):
                loss = functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert seen.findings == ()


# -- Weights -----------------------------------------------------------------------------------------


def test_a_weight_cast_anew_in_each_region() -> None:
    layer, x = torch.nn.Linear(64, 64), torch.randn(32, 64)
    with mpamp.trace() as seen, torch.no_grad():
        for _ in range(3):
            with mpamp.autocast("cpu", BRAIN):
                layer(x)
    assert {(f.kind, f.calls, f.text.split(" ")[0]) for f in seen.findings} == {
        ("weight cast again", 2, "weight"),
        ("weight cast again", 2, "bias"),
    }
    assert all("persistent_cache=True" in f.advice for f in seen.findings)
    with mpamp.trace() as seen, torch.no_grad():
        for _ in range(3):
            with mpamp.autocast("cpu", BRAIN, persistent_cache=True):
                layer(x)
    assert seen.findings == ()
    mpamp.clear_cache()


@pytest.mark.parametrize("fused", [False, True])
def test_a_weight_that_changed_is_no_finding(fused: bool) -> None:
    layer, x = torch.nn.Linear(64, 64), torch.randn(32, 64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=fused)
    with mpamp.trace() as seen:
        for _ in range(3):
            with mpamp.autocast("cpu", BRAIN):
                y = layer(x)
            y.float().sum().backward()
            optimizer.step()
    assert seen.findings == ()


def test_a_region_that_keeps_nothing_is_told() -> None:
    layer, x = torch.nn.Linear(64, 64, bias=False), torch.randn(32, 64)
    with mpamp.autocast("cpu", BRAIN, cache_enabled=False):
        finding = _only(mpamp.explain(layer, x))
    assert (finding.kind, finding.advice) == ("weight cast at every call", "Enter it with cache_enabled=True.")


def test_part_of_a_larger_storage_is_told() -> None:
    layer, x = torch.nn.Linear(64, 64, bias=False), torch.randn(32, 64)
    layer.weight = torch.nn.Parameter(torch.randn(128, 64)[:64])
    with mpamp.autocast("cpu", BRAIN):
        assert "part of a larger storage" in _only(mpamp.explain(layer, x)).text


# -- To float32 and back -------------------------------------------------------------------------------


def test_a_round_trip_is_followed_through_what_keeps_the_dtype() -> None:
    x, w = torch.randn(64, 64, dtype=BRAIN), torch.randn(64, 64, dtype=BRAIN)
    with mpamp.trace() as seen, mpamp.autocast("cpu", BRAIN, ops={"softmax": "fp32"}):
        y = torch.relu(x.softmax(1).view(64, 64)) * 2
        y @ w
    finding = _only(seen)
    assert (finding.kind, finding.op, finding.cast_bytes) == ("round trip", "aten::softmax.int", 2 * 64 * 64 * 6)


def test_what_stays_in_float32_is_no_round_trip() -> None:
    x, wide = torch.randn(64, 64, dtype=BRAIN), torch.randn(64, 64)
    with mpamp.trace() as seen, mpamp.autocast("cpu", BRAIN, ops={"softmax": "fp32"}):
        x.softmax(1).sum()
        (x.softmax(1) + wide) @ x
        wide.softmax(1) @ x
    assert seen.findings == ()


def test_what_a_shipped_rule_does_is_by_design() -> None:
    x = torch.randn(64, 64, dtype=torch.float16)
    with mpamp.trace() as seen, mpamp.autocast("cpu", torch.float16):
        x.softmax(1) @ x
    assert seen.findings == ()
    (finding,) = seen.by_design
    assert (finding.kind, finding.is_shipped) == ("round trip", True)
    assert "means it so" in finding.advice
    assert str(finding) in str(seen)
    assert finding.to_dict() in seen.to_dict()["by_design"]
    assert "By design: 1" in seen.to_html()


# -- Dtypes that meet ----------------------------------------------------------------------------------


def test_a_mask_in_float32_is_named_and_a_stream_is_not() -> None:
    x = torch.randn(4, 32, 64, dtype=BRAIN)
    with mpamp.trace() as seen, mpamp.autocast("cpu", BRAIN):
        x + torch.randn(4, 32, 64)
        x + torch.tensor(2.0)
    assert seen.findings == ()
    with seen, mpamp.autocast("cpu", BRAIN):
        x + torch.zeros(32, 64)
    assert (_only(seen).kind, _only(seen).calls) == ("one float32 argument", 1)


def test_float64_is_named_where_it_comes_in() -> None:
    x = torch.randn(64, 64)
    with mpamp.trace() as seen, mpamp.autocast("cpu", BRAIN):
        y = torch.relu(x * torch.ones(64, dtype=torch.float64)) + 1
        y @ y
    assert (_only(seen).kind, _only(seen).op, _only(seen).calls) == ("float64", "aten::mul.Tensor", 1)


@pytest.fixture
def library() -> Iterator[None]:
    found = torch.library.Library("insight_lib", "FRAGMENT")
    found.define("fru(Tensor x) -> Tensor")
    found.impl("fru", lambda x: x * 2, "CPU")
    yield
    found._destroy()


def test_an_op_that_no_table_knows_is_named(library: None) -> None:
    fru = torch.ops.insight_lib.fru
    with mpamp.trace() as seen, mpamp.autocast("cpu", BRAIN):
        assert fru(torch.ones(4)).dtype is torch.float32
    finding = _only(seen)
    assert (finding.kind, finding.ops) == ("unknown op", {"insight_lib::fru": "lower_precision_fp"})
    with mpamp.trace() as seen, mpamp.autocast("cpu", BRAIN, ops={"insight_lib::fru": "fp32"}):
        fru(torch.ones(4))
    assert (seen.findings, seen.calls) == ((), 1)
