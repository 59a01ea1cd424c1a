"""The trace counts what others count; it changes nothing, and leaves nothing."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mpamp
from mpamp import engine
from mpamp.testing import KernelCounter, WeightCastCounter
from tests import processes
from tests.torches import needs_transforms

from .models import Transformer, clean

BRAIN = torch.bfloat16
KINDS = ("resnet", "transformer", "lstm")


def _profiled(model: torch.nn.Module, x: torch.Tensor) -> list[Any]:
    with torch.autograd.profiler.profile() as profile:
        model(x)
    return list(profile.function_events)


def _is_autocasts(event: Any) -> bool:
    """Tell whether a cast was made for an op of the table, not by a kernel that adds up in float32 by itself."""
    listed = {op.partition(".")[0] for op, row in mpamp.get_op_table("cpu").items() if row.at(BRAIN) is not None}
    return event.name == "aten::_to_copy" and event.cpu_parent.cpu_parent.name in listed


# -- Counts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_casts_are_those_that_a_profiler_counts(kind: str) -> None:
    model, x = clean()[kind]
    with mpamp.autocast("cpu", BRAIN):
        counted = sum(map(_is_autocasts, _profiled(model, x)))
    with mpamp.trace() as seen, mpamp.autocast("cpu", BRAIN):
        model(x)
    assert seen.casts == counted > 0


@pytest.mark.parametrize("kind", KINDS)
def test_casts_are_those_that_a_dispatch_mode_counts(kind: str) -> None:
    model, x = clean()[kind]
    with mpamp.trace() as seen, mpamp.autocast("cpu", BRAIN), KernelCounter() as kernels:
        model(x)
    assert seen.casts == kernels.counts["aten::_to_copy"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_calls_are_those_that_a_profiler_counts(kind: str) -> None:
    model, x = clean()[kind]
    counted = Counter(event.name for event in _profiled(model, x))  # in float32, where no autocast calls an op again
    calls: Counter[str] = Counter()
    with mpamp.autocast("cpu", BRAIN):
        for use in mpamp.explain(model, x).uses:
            calls[use.op.partition(".")[0]] += use.calls
    ops = ("linear", "conv2d", "layer_norm", "relu", "gelu", "scaled_dot_product_attention")
    assert [calls[f"aten::{op}"] for op in ops] == [counted[f"aten::{op}"] for op in ops]


def test_kept_casts_are_told_from_casts() -> None:
    layer, x = torch.nn.Linear(64, 64), torch.randn(32, 64)
    with mpamp.trace() as seen, mpamp.autocast("cpu", BRAIN), WeightCastCounter(layer) as weights:
        for _ in range(3):
            layer(x)
    (use,) = seen.uses
    assert (use.calls, use.casts, use.kept_used, weights.count) == (3, 5, 4, 2)
    assert use.cast_bytes == (3 * x.numel() + layer.weight.numel() + layer.bias.numel()) * 6
    assert 0 < use.cast_us < use.host_us


def test_a_use_says_who_decided_and_which_dtypes() -> None:
    x = torch.randn(64, 64, dtype=BRAIN)
    with mpamp.trace() as seen, mpamp.autocast("cpu", BRAIN, ops={"exp": "fp32"}):
        torch.exp(x)
        torch.mm(x, x)
        torch.tanh(x)
    found = {use.op: (use.policy, use.rule, use.dtypes_in, use.dtypes_out, use.casts) for use in seen.uses}
    assert found == {
        "aten::exp": ("fp32", "region", ("bfloat16",), ("float32",), 1),
        "aten::mm": ("lower_precision_fp", "native", ("bfloat16", "bfloat16"), ("bfloat16",), 0),
        "aten::tanh": ("", "", ("bfloat16",), ("bfloat16",), 0),
    }


def test_rules_of_user_and_registered_are_named() -> None:
    x = torch.randn(64, 64)
    mpamp.set_op_rules("cpu", {"mm": "fp32"})
    try:
        with mpamp.trace() as seen, mpamp.autocast("cpu", BRAIN):
            torch.mm(x, x)
    finally:
        mpamp.set_op_rules("cpu", None)
    assert [(use.policy, use.rule) for use in seen.uses] == [("fp32", "user")]


# -- Where -------------------------------------------------------------------------------------------


def test_modules_are_named_as_the_model_names_them() -> None:
    model, x = clean()["transformer"]
    with mpamp.trace() as seen, mpamp.autocast("cpu", BRAIN):
        loss = functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
    loss.backward()
    places = {use.module for use in seen.uses if use.op == "aten::linear"}
    layers = {f"layers.{i}.{name}" for i in range(2) for name in ("qkv", "out", "up", "down")}
    assert places == {"head", *layers}
    assert [use.module for use in seen.uses if use.op == "aten::cross_entropy_loss"] == [""]
    assert {use.module for use in seen.uses if use.op == "aten::add.Tensor"} == {"Transformer", "layers.0", "layers.1"}


def test_two_models_are_told_apart() -> None:
    first, second = torch.nn.Sequential(torch.nn.Linear(64, 64)), torch.nn.ModuleList([torch.nn.Linear(64, 64)])
    critic = type("Critic", (torch.nn.Module,), {"forward": lambda self, x: self.net[0](x)})()
    critic.net = second
    with mpamp.trace() as seen, mpamp.autocast("cpu", BRAIN):
        critic(first(torch.randn(64, 64)))
    assert [use.module for use in seen.uses] == ["0", "Critic:net.0"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recompute_is_seen_as_backward(reentrant: bool) -> None:
    layer, x = torch.nn.Linear(64, 64), torch.randn(32, 64, requires_grad=True)
    with mpamp.trace() as seen:
        with mpamp.autocast("cpu", BRAIN):
            y = checkpoint(layer, x, use_reentrant=reentrant)
        y.float().sum().backward()
    assert {use.phase: (use.op, use.calls, use.casts) for use in seen.uses} == {
        "forward": ("aten::linear", 1, 3),
        "backward": ("aten::linear", 1, 3),
    }
    # A recompute that needs no more than what the op saves is stopped there, so it gives nothing back.
    assert [use.dtypes_out for use in seen.uses] == [("bfloat16",), ("bfloat16",) if reentrant else ()]


def test_ops_of_a_backward_pass_in_a_region_are_seen() -> None:
    x = torch.randn(64, 64, dtype=BRAIN, requires_grad=True)
    with mpamp.trace() as seen, mpamp.autocast("cpu", BRAIN):
        torch.mm(x, x).backward(torch.ones(64, 64, dtype=BRAIN))
    assert {(use.op, use.phase): use.calls for use in seen.uses if use.op == "aten::mm"} == {
        ("aten::mm", "forward"): 1,
        ("aten::mm", "backward"): 2,
    }


def test_other_threads_are_seen() -> None:
    def work() -> None:
        with mpamp.autocast("cpu", BRAIN):
            torch.mm(torch.ones(8, 8), torch.ones(8, 8))

    with mpamp.trace() as seen:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (seen.calls, seen.casts) == (4, 8)


def test_nested_regions_are_seen_each_by_its_own_rules() -> None:
    x = torch.randn(64, 64)
    with mpamp.trace() as seen, mpamp.autocast("cpu", BRAIN):
        torch.mm(x, x)
        with mpamp.autocast("cpu", torch.float16, ops={"mm": "fp32"}):
            torch.mm(x, x)
        with mpamp.autocast("cpu", enabled=False):
            torch.mm(x, x)
    assert [(use.region, use.policy, use.calls) for use in seen.uses] == [
        ("bfloat16", "lower_precision_fp", 1),
        ("float16", "fp32", 1),
    ]


def test_a_compiled_graph_is_listed_once() -> None:
    model, x = torch.nn.Linear(64, 64), torch.randn(32, 64)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with mpamp.trace() as seen, mpamp.autocast("cpu", BRAIN):
        results = [compiled(x) for _ in range(3)]
    torch._dynamo.reset()
    assert {y.dtype for y in results} == {BRAIN}
    assert [(use.op, use.phase, use.calls, use.casts) for use in seen.uses] == [("aten::linear", "compiled", 1, 3)]
    assert (seen.calls, seen.casts) == (0, 0)
    assert any("compiled" in line for line in seen.unseen)


def test_a_compiled_graph_has_its_modules_names_and_the_casts_of_its_code() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.rest = torch.nn.Linear(64, 64), torch.nn.Sequential(torch.nn.Linear(64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rest(self.first(x).float())

    model = Model()
    torch._dynamo.reset()
    with mpamp.autocast("cpu", BRAIN):
        seen = mpamp.explain(torch.compile(model, backend="aot_eager", fullgraph=True), torch.randn(32, 64))
    torch._dynamo.reset()
    assert {(use.module, use.op, use.calls, use.casts) for use in seen.uses if use.phase == "compiled"} == {
        ("first", "aten::linear", 1, 3),
        ("rest.0", "aten::linear", 1, 3),
        ("", "aten::_to_copy", 1, 0),
    }


@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning")
@pytest.mark.parametrize("strict", [pytest.param(False, marks=needs_transforms), True])
def test_an_exported_program_is_listed_with_the_casts_that_it_will_make(strict: bool) -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Softmax(-1)), torch.randn(32, 64)
    with mpamp.trace() as seen, mpamp.autocast("cpu", BRAIN):
        program = torch.export.export(model, (x,), strict=strict)
    assert {(use.module, use.op, use.phase): (use.calls, use.casts) for use in seen.uses} == {
        ("0", "aten::linear", "compiled"): (1, 3),
        ("1", "aten::softmax.int", "compiled"): (1, 0),
    }
    assert seen.calls == 0
    nodes = [str(node.target) for node in program.run_decompositions().graph.nodes if node.op == "call_function"]
    assert nodes.count("aten._softmax.default") == 1
    assert nodes.count("aten._to_copy.default") == sum(use.casts for use in seen.uses) == 3


@pytest.mark.parametrize("history", [-1, 1.5, "all"])
def test_a_history_that_can_not_be_is_refused(history: Any) -> None:
    with pytest.raises(ValueError, match="a number of at least 0"):
        mpamp.trace(history)


def test_what_is_no_module_is_not_explained() -> None:
    with pytest.raises(TypeError, match=r"explain takes a torch\.nn\.Module, got function"):
        mpamp.explain(lambda x: x, torch.ones(2))  # type: ignore[arg-type]


def test_a_trace_has_nothing_compiled_anew() -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()), torch.randn(32, 64)
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with mpamp.autocast("cpu", BRAIN):
        compiled(x)
        with mpamp.trace():
            compiled(x)
        compiled(x)
    torch._dynamo.reset()
    assert len(graphs) == 1


# -- Nothing is changed, nothing is left ---------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BRAIN, torch.float16])
def test_results_are_those_without_a_trace(kind: str, dtype: torch.dtype) -> None:
    model, x = clean()[kind]
    found = []
    for context in (mpamp.trace, None, mpamp.trace):
        model.zero_grad()
        with mpamp.autocast("cpu", dtype):
            if context is None:
                y = model(x)
            else:
                with context():
                    y = model(x)
        y.float().square().mean().backward()
        found.append([y, *(p.grad for p in model.parameters())])
    model.zero_grad()
    for other in (found[0], found[2]):
        for a, b in zip(found[1], other, strict=True):
            assert a is not None
            assert b is not None
            assert a.dtype is b.dtype
            assert torch.equal(a, b)


def test_explain_leaves_buffers_and_random_numbers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout())
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    assert mpamp.explain(model, torch.ones(32, 64)).casts == 3
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_memory_stays_flat_with_history() -> None:
    layer, x = torch.nn.Linear(16, 16), torch.randn(4, 16)
    with mpamp.trace(history=50) as seen, mpamp.autocast("cpu", BRAIN):

        def steps(count: int) -> int:
            for _ in range(count):
                torch.relu(layer(x)).sum().backward()
            gc.collect()
            return len(gc.get_objects())

        steps(100)
        before = steps(100)
        assert steps(2000) - before < 50
        facts = seen._recorder.faults
        assert len(facts._raised) + len(facts._doubles) == 0
    assert len(seen.history) == 50
    assert seen.uses[0].calls == 2200


def test_an_open_trace_is_not_opened_again() -> None:
    with mpamp.trace() as seen, pytest.raises(RuntimeError, match="is open"):
        seen.__enter__()
    with seen:
        pass
    assert seen.calls == 0


def test_kept_casts_are_the_same_with_and_without_a_trace() -> None:
    layer, x = torch.nn.Linear(64, 64), torch.randn(32, 64)
    mpamp.clear_cache()
    made = []
    for context in (contextlib.nullcontext, mpamp.trace, contextlib.nullcontext, mpamp.trace):
        before = mpamp.cache_info().casts
        with context() as seen, mpamp.autocast("cpu", BRAIN, persistent_cache=True):
            layer(x)
        made.append((mpamp.cache_info().casts - before, mpamp.cache_info().entries))
        assert seen is None or (seen.casts, seen.kept_used) == (1, 2)
    mpamp.clear_cache()
    assert made == [(2, 2), (0, 2), (0, 2), (0, 2)]


def test_two_traces_see_the_same() -> None:
    x = torch.ones(8, 8)
    with mpamp.trace() as outer, mpamp.autocast("cpu", BRAIN):
        with mpamp.trace() as inner:
            torch.mm(x, x)
        torch.mm(x, x)
    assert (outer.calls, inner.calls) == (2, 1)
    assert engine.installed("cpu")


def test_a_transformer_of_twelve_layers_is_explained() -> None:
    model = Transformer(layers=12)
    with mpamp.autocast("cpu", BRAIN):
        seen = mpamp.explain(model, torch.randint(50, (8, 16)))
    assert sum(use.calls for use in seen.uses if use.op == "aten::linear") == 4 * 12 + 1
    assert seen.findings == ()


def test_an_engine_that_was_asked_for_before_the_first_region_is_observed() -> None:
    program = (
        "import torch, mpamp\nfrom mpamp import engine\nengine.which()\n"
        "layer, x = torch.nn.Linear(8, 8), torch.ones(2, 8)\n"
        "with mpamp.autocast('cpu', torch.bfloat16): layer(x)\n"
        "with mpamp.trace() as seen, mpamp.autocast('cpu', torch.bfloat16): layer(x)\nprint(seen.calls, seen.casts)"
    )
    found = processes.python("-W", "ignore", "-c", program)
    assert found.stdout == "1 3\n", found.stderr
