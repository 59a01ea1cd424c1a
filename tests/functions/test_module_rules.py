"""Modules with rules: the same dtypes in eager code, programs, recomputes and copies, and gone when removed."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import mpamp
from mpamp.devices import registry
from mpamp.errors import ModuleRuleError
from mpamp.functions import modulerule
from mpamp.functions.ruledforward import RuledForward
from tests.torches import needs_transforms

FULL, LOW, HALF = torch.float32, torch.bfloat16, torch.float16
X = torch.linspace(-1, 1, 8).reshape(2, 4)
Dtypes = list[torch.dtype]


class Block(nn.Module):
    """Returns what a lower-precision op, an op that isn't listed on processors, and a sum of an input gave."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        low = self.lin(x)
        return low, low.softmax(-1), self.inner(low), x * 1


class Logged(Block):
    def __init__(self) -> None:
        super().__init__()
        self.log: Dtypes = []

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs: list[torch.Tensor] = []
        for op in (lambda: self.lin(x), lambda: outputs[0].softmax(-1), lambda: self.inner(outputs[0]), lambda: x * 1):
            outputs.append(op())
            self.log.append(outputs[-1].dtype)
        return tuple(outputs)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = nn.Linear(4, 4), Block(), Block()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.stem(x)
        return (*self.a(x), *self.b(x))


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that other tests asked for, and that are none here, are none of a program's."""
    for kind in ("cuda", "xpu"):  # so that they are among all devices, when those are there again
        registry.device_state(kind)
    monkeypatch.setattr(registry, "DEVICES", [registry.device_state("cpu")])


def make_model(rules: Any = None) -> Model:
    torch.manual_seed(0)
    model = Model()
    if rules:
        mpamp.module_rules(model, rules)
    return model


def dtypes(values: Any) -> Dtypes:
    return [value.dtype for value in values]


def run(model: Callable[..., Any], **options: Any) -> Dtypes:
    with mpamp.autocast("cpu", dtype=options.pop("dtype", LOW), **options):
        return dtypes(model(X))


PLAIN = [LOW] * 4
HALVES = [HALF, FULL, HALF, LOW]
"""A float16 region in a bfloat16 one: the processor's table has softmax in float32 there."""
RULES: dict[str, tuple[Any, Dtypes]] = {
    "fp32": ({"a": "fp32"}, [FULL] * 4),
    "another dtype": ({"a": "float16"}, HALVES),
    "off, for float32 input": ({"stem": "fp32", "a": False}, [FULL] * 4),
    "ops": ({"a": {"softmax": "fp32", "mul": "fp32"}}, [LOW, FULL, LOW, FULL]),
    "a table": ({"a": mpamp.OpTable({"softmax": "fp32"})}, [LOW, FULL, LOW, LOW]),
    "by dtype": ({"a": {"softmax": {"bfloat16": "fp32"}, "mul": {"float16": "fp32"}}}, [LOW, FULL, LOW, LOW]),
    "inner fp32": ({"a": HALF, "a.inner": "fp32"}, [HALF, FULL, FULL, LOW]),
    "inner dtype in fp32": ({"a": "fp32", "a.inner": LOW}, [FULL, FULL, LOW, FULL]),
    "inner dtype in off": ({"stem": "fp32", "a": False, "a.inner": LOW}, [FULL, FULL, LOW, FULL]),
    "inner ops in fp32": ({"a": "fp32", "a.inner": {"linear": "lower_precision_fp"}}, [FULL] * 4),
    "inner ops in off": ({"stem": "fp32", "a": False, "a.inner": {"linear": "lower_precision_fp"}}, [FULL] * 4),
    "inner ops in ops": ({"a": {"softmax": "fp32"}, "a.inner": {"linear": "fp32"}}, [LOW, FULL, FULL, LOW]),
    "inner off": ({"a": "fp32", "a.inner": False}, [FULL] * 4),
}
by_rules = pytest.mark.parametrize("name", RULES)


@by_rules
def test_what_each_rule_does(name: str) -> None:
    rules, wanted = RULES[name]
    model = make_model(rules)
    rest = PLAIN if "stem" not in rules else [LOW, LOW, LOW, FULL]
    assert run(model) == [*wanted, *rest]
    assert not torch.is_autocast_enabled("cpu")
    assert dtypes(model(X)) == [FULL] * 8


def test_a_float32_module_gets_float32_and_is_as_exact() -> None:
    """Its arguments are cast in nested containers too; int and float64 ones, and those of other devices, are not."""
    seen: list[Any] = []

    class Reader(nn.Module):
        def forward(self, x: torch.Tensor, *, more: dict[str, Any]) -> torch.Tensor:
            seen.append((x, more))
            return x.exp()

    model = nn.Sequential(Reader())
    ids, wide, absent = torch.arange(3), torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=LOW, device="meta")
    arguments = {"list": [torch.ones(2, dtype=HALF)], "ids": ids, "wide": wide, "meta": absent}
    mpamp.module_rules(model, {"0": "fp32"})
    x = torch.ones(2, dtype=LOW)
    with mpamp.autocast("cpu", dtype=LOW):
        out = model[0](x, more=arguments)
    got, more = seen[0]
    assert got.dtype is more["list"][0].dtype is out.dtype is FULL
    assert more["ids"] is ids
    assert more["wide"] is wide
    assert more["meta"] is absent
    assert torch.equal(out, torch.ones(2).exp())
    model[0](x, more=arguments)
    assert seen[1][0] is x


def test_only_float32_modules_cast_what_they_get() -> None:
    model = nn.Sequential(nn.Identity())
    for rule in (False, HALF, {"gelu": "fp32"}):
        with mpamp.module_rules(model, {"0": rule}):
            assert mpamp_identity(model) is LOW


def mpamp_identity(model: nn.Module) -> torch.dtype:
    with mpamp.autocast("cpu", dtype=LOW):
        return model(X.to(LOW)).dtype  # type: ignore[no-any-return]


# -- The region around it ------------------------------------------------------------------------------


def test_op_rules_go_on_top_of_the_open_regions() -> None:
    model = make_model({"a": {"softmax": "fp32"}})
    assert run(model, ops={"linear": "fp32"}) == [FULL, FULL, FULL, FULL, FULL, FULL, FULL, FULL]
    assert run(model, ops={"mul": "fp32"}) == [LOW, FULL, LOW, FULL, LOW, LOW, LOW, FULL]
    assert run(model, dtype=HALF) == [HALF, FULL, HALF, HALF] * 2
    assert run(model, dtype=FULL) == [FULL] * 8


def test_it_ends_with_the_module_whatever_happens() -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    model = nn.Sequential(Failing(), nn.Linear(4, 4))
    mpamp.module_rules(model, {"0": "fp32"})
    with mpamp.autocast("cpu", dtype=LOW):
        with pytest.raises(KeyboardInterrupt):
            model(X)
        assert model[1](X).dtype is LOW
    assert not torch.is_autocast_enabled("cpu")


def test_no_effect_outside_of_mpamps_regions() -> None:
    model = make_model({"a": {"softmax": "fp32"}, "b": "fp32"})
    with torch.autocast("cpu", dtype=LOW):
        assert dtypes(model(X)) == [LOW] * 8
    assert run(model, enabled=False) == [FULL] * 8


def test_other_devices_regions_are_left_alone() -> None:
    model = make_model({"a": "fp32", "b": mpamp.OpTable({"softmax": "fp32"}, device="cuda")})
    assert run(model) == [FULL] * 4 + PLAIN


def test_a_dtype_that_the_device_has_no_regions_of() -> None:
    model = make_model({"a": "fp32"})
    rule = modulerule.ModuleRule(torch.float64)
    with mpamp.autocast("cpu"), pytest.raises(mpamp.UnsupportedDtypeError):
        modulerule.run_by(rule, model.a, (X,), {})


def test_rules_of_the_process_that_change_later() -> None:
    model = make_model({"a": {"gelu": "fp32"}})
    try:
        mpamp.set_op_rules("cpu", {"softmax": "fp32"})
        assert run(model) == [LOW, FULL, LOW, LOW] * 2
    finally:
        mpamp.set_op_rules("cpu", {})
    assert run(model) == PLAIN * 2


def test_each_weight_is_cast_once() -> None:
    model = make_model({"a": {"softmax": "fp32"}, "b": "fp32"})
    before = mpamp.cache_info().casts
    with mpamp.autocast("cpu", dtype=LOW):
        for _ in range(3):
            model(X)
        assert mpamp.cache_info().casts - before == 6  # stem's and a's
        mpamp.clear_cache()
    with mpamp.autocast("cpu", dtype=LOW, cache_enabled=False):
        model(X)
        assert mpamp.cache_info().entries == 0
    for _ in range(2):
        with mpamp.autocast("cpu", dtype=LOW, persistent_cache=True), torch.no_grad():
            model(X)
    assert mpamp.cache_info().entries == 6
    mpamp.clear_cache()


def test_regions_are_made_once() -> None:
    model = make_model({"a": {"softmax": "fp32"}})
    run(model)
    before = dict(modulerule._known)
    for _ in range(3):
        run(model)
    assert modulerule._known == before


def test_another_thread() -> None:
    model, found = make_model({"a": "fp32"}), []
    thread = threading.Thread(target=lambda: found.append(run(model)))
    thread.start()
    thread.join()
    assert found == [[FULL] * 4 + PLAIN]


# -- Programs and recomputes ---------------------------------------------------------------------------


class InRegion(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        with mpamp.autocast("cpu", dtype=LOW):
            return self.model(x)


@by_rules
def test_compiled_as_eager(name: str) -> None:
    torch._dynamo.reset()
    model = make_model(RULES[name][0])
    wanted = run(model)
    assert run(torch.compile(model, fullgraph=True, backend="aot_eager")) == wanted
    assert dtypes(torch.compile(InRegion(model), fullgraph=True, backend="aot_eager")(X)) == wanted


@pytest.mark.parametrize("name", ["fp32", "ops"])
def test_a_program_is_for_the_devices_of_its_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another device in use, which no region is around for, is none of it: torch would warn that it is absent."""
    monkeypatch.setattr(registry, "DEVICES", [registry.device_state(kind) for kind in ("cpu", "cuda", "xpu")])
    torch._dynamo.reset()
    model = make_model(RULES[name][0])
    assert dtypes(torch.compile(InRegion(model), fullgraph=True, backend="aot_eager")(X)) == run(model)


def test_compiled_values_and_gradients_are_eagers() -> None:
    torch._dynamo.reset()
    model = make_model({"a": "fp32", "a.inner": HALF, "b": {"softmax": "fp32"}})
    results = []
    for call in (InRegion(model), torch.compile(InRegion(model), fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        outputs = call(X)
        sum(out.float().sum() for out in outputs).backward()
        results.append([*outputs, *(p.grad for p in model.parameters())])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled)


def test_compiled_code_follows_a_change_of_rules() -> None:
    torch._dynamo.reset()
    model = make_model()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert run(compiled) == PLAIN * 2
    first = mpamp.module_rules(model, {"a": "fp32"})
    assert run(compiled) == [FULL] * 4 + PLAIN
    second = mpamp.module_rules(model, {"a": HALF})
    assert run(compiled) == HALVES + PLAIN
    second.remove()
    assert run(compiled) == [FULL] * 4 + PLAIN
    first.remove()
    assert run(compiled) == PLAIN * 2


def test_compiled_in_pieces() -> None:
    torch._dynamo.reset()

    class Broken(Block):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            low = self.lin(x)
            torch._dynamo.graph_break()
            return low, low.softmax(-1), self.inner(low), x * 1

    model = make_model()
    model.a, model.b = Broken(), Broken()
    mpamp.module_rules(model, {"a": "fp32", "b": {"softmax": "fp32"}})
    graphs = []

    def count(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph

    with torch.no_grad():  # torch warns of a piece's input that requires grad
        wanted = run(model)
        assert wanted == [FULL] * 4 + [LOW, FULL, LOW, LOW]
        assert run(torch.compile(model, backend=count)) == wanted
        assert dtypes(torch.compile(InRegion(model), backend=count)(X)) == wanted
    assert len(graphs) >= 4


def test_inductor() -> None:
    torch._dynamo.reset()
    model = make_model({"a": "fp32", "b": {"softmax": "fp32"}})
    assert dtypes(torch.compile(InRegion(model), fullgraph=True)(X)) == [FULL] * 4 + [LOW, FULL, LOW, LOW]


@by_rules
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_as_it_was(name: str, reentrant: bool) -> None:
    model = make_model()
    blocks = model.a, model.b = Logged(), Logged()
    mpamp.module_rules(model, RULES[name][0])

    def forward(x: torch.Tensor) -> Any:
        x = model.stem(x)
        a = checkpoint(model.a, x, use_reentrant=reentrant)
        return (*a, *checkpoint(model.b, x, use_reentrant=reentrant))

    run(model)
    logs = [block.log.copy() for block in blocks]
    for block in blocks:
        block.log.clear()
    with mpamp.autocast("cpu", dtype=LOW), set_checkpoint_early_stop(False):
        outputs = forward(X)
    assert [block.log for block in blocks] == logs
    sum(out.float().sum() for out in outputs).backward()
    assert [block.log for block in blocks] == [log * 2 for log in logs]
    assert [p.grad.dtype for p in model.parameters()] == [FULL] * 10


@pytest.mark.parametrize(
    ("name", "strict"), [*((name, False) for name in RULES), ("fp32", True), ("ops", True), ("inner off", True)]
)
def test_exported_as_eager(name: str, strict: bool) -> None:
    torch._dynamo.reset()
    model = make_model(RULES[name][0])
    wanted = run(model)
    program = torch.export.export(InRegion(model), (X,), strict=strict).module()
    assert dtypes(program(X)) == wanted
    with torch.no_grad():
        for eager, exported in zip(InRegion(model)(X), program(X), strict=True):
            assert torch.equal(eager, exported)


def test_jit_trace() -> None:
    model = make_model({"a": "fp32", "b": {"softmax": "fp32"}})
    traced = torch.jit.trace(InRegion(model), X)
    assert dtypes(traced(X)) == [FULL] * 4 + [LOW, FULL, LOW, LOW]


@needs_transforms
def test_vmap_and_functional_call() -> None:
    model = make_model({"a": "fp32"})
    state = dict(model.named_parameters())
    with mpamp.autocast("cpu", dtype=LOW):
        out = torch.func.vmap(lambda x: torch.func.functional_call(model, state, (x,)))(X)
    assert dtypes(out) == [FULL] * 4 + PLAIN


# -- Copies and pickles --------------------------------------------------------------------------------


def _saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Model], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": _saved,
    "ema": lambda model: torch.optim.swa_utils.AveragedModel(model).module,
    "twice": lambda model: copy.deepcopy(copy.deepcopy(model)),
}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_has_the_rules_and_its_own_weights(way: str) -> None:
    model = make_model({"a": "fp32", "b": {"softmax": "fp32"}})
    keys = list(model.state_dict())
    copied = COPIES[way](model)
    del model
    gc.collect()
    assert run(copied) == [FULL] * 4 + [LOW, FULL, LOW, LOW]
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    with mpamp.autocast("cpu", dtype=LOW):
        assert copied(X)[0].abs().max() == 0
    assert list(copied.state_dict()) == keys == list(make_model().state_dict())


def test_a_copys_rules_are_removed_by_the_handle() -> None:
    model = make_model()
    handle = mpamp.module_rules(model, {"a": "fp32"})
    copied = copy.deepcopy(model)
    handle.remove()
    assert run(model) == PLAIN * 2
    assert run(copied) == [FULL] * 4 + PLAIN
    handle.remove(copied)
    assert run(copied) == PLAIN * 2
    assert "forward" not in copied.a.__dict__


def test_a_replica_runs_its_own_weights() -> None:
    """What DataParallel makes for each of its devices."""
    layer = nn.Linear(4, 4)
    mpamp.module_rules(layer, {"": "fp32"})
    replica = layer._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.zeros(4, 4), torch.zeros(4)
    with mpamp.autocast("cpu", dtype=LOW):
        out = replica(X)
        assert out.abs().max() == 0
        assert out.dtype is FULL
        assert layer(X).abs().max() > 0


def test_the_model_goes_when_nobody_has_it() -> None:
    model = make_model()
    handle = mpamp.module_rules(model, {"a": "fp32"})
    run(model)
    gone = weakref.ref(model.a)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
    handle.remove()


def test_a_forward_that_outlives_its_module() -> None:
    layer = nn.Linear(4, 4)
    mpamp.module_rules(layer, {"": "fp32"})
    forward = layer.forward
    del layer
    gc.collect()
    with pytest.raises(ReferenceError, match="the module is gone"):
        forward(X)


# -- What stays as it is -------------------------------------------------------------------------------


def test_classes_signatures_and_keys_stay() -> None:
    model = make_model({"a": "fp32", "a.lin": "fp32"})
    assert type(model.a) is Block
    assert type(model.a.lin) is nn.Linear
    assert list(model.state_dict()) == list(make_model().state_dict())
    assert inspect.signature(model.a.forward) == inspect.signature(make_model().a.forward)
    model.load_state_dict(make_model().state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in make_model().named_modules()]


def test_a_class_that_changes_later() -> None:
    """As FSDP2 and parametrizations do it."""
    model = nn.Sequential(nn.Linear(4, 4))
    mpamp.module_rules(model, {"0": "fp32"})
    torch.nn.utils.parametrizations.weight_norm(model[0])
    assert type(model[0]) is not nn.Linear
    assert mpamp_identity(model) is FULL


def test_a_forward_of_the_modules_own() -> None:
    layer = nn.Linear(4, 4)
    own = layer.forward = lambda x: torch.zeros(3) + x.sum()  # type: ignore[method-assign]
    handle = mpamp.module_rules(layer, {"": "fp32"})
    with mpamp.autocast("cpu"):
        assert layer(X.to(LOW)).shape == (3,)
        assert layer(X.to(LOW)).dtype is FULL
    handle.remove()
    assert layer.forward is own


def test_a_forward_that_is_put_over_it() -> None:
    layer = nn.Linear(4, 4)
    handle = mpamp.module_rules(layer, {"": "fp32"})
    ruled = layer.forward
    over = layer.forward = lambda x: ruled(x)  # type: ignore[method-assign]
    assert mpamp_identity(layer) is FULL
    handle.remove()
    assert layer.forward is over
    assert mpamp_identity(layer) is LOW


def test_with_a_registered_forward() -> None:
    layer = nn.Linear(4, 4)
    mpamp.register_float_function(layer, "forward")
    handle = mpamp.module_rules(layer, {"": HALF})
    assert mpamp_identity(copy.deepcopy(layer)) is FULL
    handle.remove()
    mpamp.unregister_float_function(layer, "forward")
    assert "forward" not in layer.__dict__


# -- The handle ----------------------------------------------------------------------------------------


def test_removing() -> None:
    model = make_model()
    handle = mpamp.module_rules(model, {"a": "fp32"})
    assert repr(handle) == "<ModuleRules of 1 modules>"
    assert {name: str(rule) for name, rule in handle.rules.items()} == {"a": "fp32"}
    assert isinstance(model.a.forward, RuledForward)
    for _ in range(2):
        handle.remove()
        assert run(model) == PLAIN * 2
    assert "forward" not in model.a.__dict__


def test_as_a_context() -> None:
    model = make_model()
    with mpamp.module_rules(model, {"a": "fp32"}) as handle:
        assert list(handle.rules) == ["a"]
        assert run(model) == [FULL] * 4 + PLAIN
    assert run(model) == PLAIN * 2


def test_the_latest_rules_hold_and_are_removed_in_any_order() -> None:
    model = make_model()
    first = mpamp.module_rules(model, {"a": "fp32"})
    second = mpamp.module_rules(model, {"a": HALF, "b": HALF})
    assert run(model) == HALVES * 2
    first.remove()
    assert run(model) == HALVES * 2
    second.remove()
    assert run(model) == PLAIN * 2
    with pytest.raises(ModuleRuleError):
        mpamp.module_rules(model, {"c": "fp32"})
