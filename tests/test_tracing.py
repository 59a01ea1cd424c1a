"""Regions in compiled, exported, traced, transformed, recomputed, faked and distributed programs: dtypes as eager."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mpamp
from mpamp.engine import marks
from tests.paths import search_path

ROOT = Path(__file__).parents[1]
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
Tensor = torch.Tensor
BACKENDS = ("eager", "aot_eager")
FULL_SOFTMAX, FULL_MM = {"softmax": "fp32"}, {"mm": "fp32"}
REGIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "fp16": {"dtype": HALF},
    "float32": {"dtype": FULL},
    "disabled": {"enabled": False},
    "softmax to fp32": {"ops": FULL_SOFTMAX},
    "mm to fp32": {"ops": FULL_MM},
    "fp16 and rules": {"dtype": HALF, "ops": {"softmax": "fallthrough"}},
    "whole table": {"ops": mpamp.OpTable({"softmax": "fp32"})},
}

pytestmark = pytest.mark.filterwarnings("ignore:.*lru_cache.*:UserWarning")


def region(**options: Any) -> mpamp.Region:
    return mpamp.autocast("cpu", **options)


def probe(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a product of x (float32), and softmax of a bfloat16 x, which the default CPU table doesn't list."""
    return x.mm(x), x.to(BRAIN).softmax(0)


def dtypes(tensors: Any) -> list[torch.dtype]:
    return [t.dtype for t in tensors]


def in_region(x: Tensor, **options: Any) -> list[torch.dtype]:
    """Return the probe's dtypes in an eager region."""
    with region(**options):
        return dtypes(probe(x))


@pytest.fixture
def x() -> Tensor:
    return torch.linspace(0, 1, 4).reshape(2, 2)


@pytest.fixture(autouse=True)
def compiler_is_reset() -> Iterator[None]:
    marks.forget_compiled_code()  # it can tell only a few tables apart
    yield
    mpamp.clear_cache()
    assert not torch.is_autocast_enabled("cpu")


def compiled(function: Callable[..., Any], backend: Any = "aot_eager", **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend=backend, fullgraph=True, **options)


# -- torch.compile: where the region is ----------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", REGIONS.values(), ids=REGIONS)
def test_region_inside_a_compiled_function(x: Tensor, options: dict[str, Any], backend: str) -> None:
    def function(x: Tensor) -> Any:
        with mpamp.autocast("cpu", **options):
            return probe(x)

    found = compiled(function, backend)(x)
    assert dtypes(found) == dtypes(function(x)) == in_region(x, **options)
    assert all(torch.equal(a, b) for a, b in zip(found, function(x), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", REGIONS.values(), ids=REGIONS)
def test_region_around_a_compiled_function(x: Tensor, options: dict[str, Any], backend: str) -> None:
    function = compiled(probe, backend)
    with region(**options):
        assert dtypes(function(x)) == dtypes(probe(x))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", REGIONS.values(), ids=REGIONS)
def test_decorated_function_compiled(x: Tensor, options: dict[str, Any], backend: str) -> None:
    decorated = region(**options)(probe)
    assert dtypes(compiled(decorated, backend)(x)) == in_region(x, **options)


@pytest.mark.parametrize("options", [{}, {"ops": FULL_SOFTMAX}, {"enabled": False}])
def test_decorated_function_called_in_a_compiled_one(x: Tensor, options: dict[str, Any]) -> None:
    decorated = region(**options)(probe)
    found = compiled(lambda x: (*decorated(x), x.mm(x)))(x)
    assert dtypes(found) == [*in_region(x, **options), FULL]


@pytest.mark.parametrize("options", [{}, {"ops": FULL_SOFTMAX}, {"enabled": False}])
def test_decorated_method_of_a_compiled_module(x: Tensor, options: dict[str, Any]) -> None:
    class Net(torch.nn.Module):
        @region(**options)
        def forward(self, x: Tensor) -> Any:
            return probe(x)

    assert dtypes(compiled(Net())(x)) == in_region(x, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"ops": FULL_SOFTMAX}, {"enabled": False}])
def test_prebuilt_region_inside_a_compiled_function(x: Tensor, options: dict[str, Any], backend: str) -> None:
    prebuilt = region(**options)

    def function(x: Tensor) -> Any:
        with prebuilt:
            return probe(x)

    assert dtypes(compiled(function, backend)(x)) == in_region(x, **options)


def test_prebuilt_region_works_where_the_graph_may_break(x: Tensor) -> None:
    prebuilt = region(ops=FULL_SOFTMAX)

    def function(x: Tensor) -> Any:
        with prebuilt:
            return probe(x + 1)

    assert dtypes(torch.compile(function, backend="eager")(x)) == in_region(x, ops=FULL_SOFTMAX)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nested_regions_inside_a_compiled_function(x: Tensor, backend: str) -> None:
    def function(x: Tensor) -> list[Tensor]:
        found = []
        with mpamp.autocast("cpu"):
            found += probe(x)
            with mpamp.autocast("cpu", HALF):
                found += probe(x)
                with mpamp.autocast("cpu", FULL):
                    found += probe(x)
            with mpamp.autocast("cpu", enabled=False):
                found += probe(x)
                with mpamp.autocast("cpu", ops=FULL_SOFTMAX):
                    found += probe(x)
            with mpamp.autocast("cpu", ops=FULL_MM):
                found += probe(x)
            found += probe(x)
        return [*found, *probe(x)]

    assert dtypes(compiled(function, backend)(x)) == dtypes(function(x))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("outer", [{}, {"ops": FULL_MM}, {"dtype": HALF}])
@pytest.mark.parametrize("inner", [{}, {"ops": FULL_SOFTMAX}, {"enabled": False}, {"dtype": FULL}])
def test_region_inside_and_region_around(x: Tensor, outer: dict[str, Any], inner: dict[str, Any], backend: str) -> None:
    def function(x: Tensor) -> Any:
        with mpamp.autocast("cpu", **inner):
            found = probe(x)
        return (*found, *probe(x))

    with region(**outer):
        assert dtypes(compiled(function, backend)(x)) == dtypes(function(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rules_of_an_inner_region_replace_the_outer_one_s_in_a_compiled_function(x: Tensor, backend: str) -> None:
    tables = [
        FULL_SOFTMAX,
        FULL_MM,
        {"softmax": "fallthrough"},
        {"mm": "fp32", "softmax": "fp32"},
        {"mm": "fallthrough"},
    ]
    for outer, inner in itertools.product(tables, tables):

        def function(x: Tensor, outer: Any = outer, inner: Any = inner) -> Any:
            with mpamp.autocast("cpu", ops=outer), mpamp.autocast("cpu", ops=inner):
                return probe(x)

        torch._dynamo.reset()
        assert dtypes(compiled(function, backend)(x)) == in_region(x, ops=inner)


def test_a_default_region_inside_one_with_rules_in_a_compiled_function(x: Tensor) -> None:
    def function(x: Tensor) -> Any:
        with mpamp.autocast("cpu", ops=FULL_SOFTMAX), mpamp.autocast("cpu"):
            return probe(x)

    assert dtypes(compiled(function)(x)) == in_region(x)


def test_a_compiled_function_leaves_torch_s_state_alone(x: Tensor) -> None:
    def state() -> list[Any]:
        names = ("cpu", "cuda", "xpu", "mtia", "maia", "ipu")
        return [(torch.is_autocast_enabled(n), torch.get_autocast_dtype(n)) for n in names]

    def function(x: Tensor) -> Any:
        with mpamp.autocast("cpu", ops=FULL_SOFTMAX):
            return probe(x)

    before = state()
    compiled(function)(x)
    assert state() == before


def test_rules_of_many_eager_regions_leave_room_for_compiled_ones() -> None:
    code = """
import torch, mpamp
ops = sorted(mpamp.get_op_table("cpu"))[:40]
for op in ops:
    with mpamp.autocast("cpu", ops={op: "fallthrough"}):
        pass
def function(x):
    with mpamp.autocast("cpu", ops={"softmax": "fp32"}):
        return x.softmax(0)
print(torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2, dtype=torch.bfloat16)).dtype)
"""
    assert run_python(code).strip() == "torch.float32"


# -- torch.compile: one function under several regions -------------------------------------------------


def test_one_compiled_function_under_several_tables(x: Tensor) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    function = compiled(probe, counter)
    regions = [nullcontext(), *(region(**options) for options in REGIONS.values() if options.get("enabled", True))]
    for _ in range(3):
        for each in regions:
            with each:
                assert dtypes(function(x)) == dtypes(probe(x))
    assert counter.frame_count <= len(regions)


def test_each_table_is_compiled_once(x: Tensor) -> None:
    counter = CompileCounterWithBackend("eager")
    function = compiled(probe, counter)
    for _ in range(3):
        for ops in (None, FULL_SOFTMAX, FULL_MM):
            with region(ops=ops):
                function(x)
    assert counter.frame_count == 3


def test_equal_rules_share_a_compiled_function(x: Tensor) -> None:
    counter = CompileCounterWithBackend("eager")
    function = compiled(probe, counter)
    for rules in ({"softmax": "fp32"}, {"aten::softmax": mpamp.CastPolicy.FP32}):
        with region(ops=rules):
            function(x)
    assert counter.frame_count == 1


@pytest.mark.parametrize("ours_first", [True, False])
def test_plain_torch_autocast_is_not_served_a_region_s_graph(x: Tensor, ours_first: bool) -> None:
    function = compiled(probe)
    for ours in (ours_first, not ours_first):
        with region(ops=FULL_SOFTMAX) if ours else torch.autocast("cpu", BRAIN):
            assert dtypes(function(x)) == [BRAIN, FULL if ours else BRAIN]


def test_process_wide_rules_reach_functions_compiled_before(x: Tensor) -> None:
    def inside(x: Tensor) -> Any:
        with mpamp.autocast("cpu"):
            return probe(x)

    functions = [compiled(inside), region()(compiled(probe))]
    assert [dtypes(f(x)) for f in functions] == [[BRAIN, BRAIN]] * 2
    try:
        mpamp.set_op_rules("cpu", FULL_SOFTMAX)
        assert [dtypes(f(x)) for f in functions] == [[BRAIN, FULL]] * 2
    finally:
        mpamp.set_op_rules("cpu", None)
    assert [dtypes(f(x)) for f in functions] == [[BRAIN, BRAIN]] * 2


def test_two_threads_run_one_compiled_function_under_two_tables(x: Tensor) -> None:
    function, barrier = compiled(probe, "eager"), threading.Barrier(2)

    def work(ops: dict[str, str]) -> list[list[torch.dtype]]:
        found = []
        for _ in range(5):
            barrier.wait()
            with region(ops=ops):
                found.append(dtypes(function(x)))
        return found

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, [FULL_SOFTMAX, FULL_MM])) == [[[BRAIN, FULL]] * 5, [[FULL, BRAIN]] * 5]


# -- torch.compile: weights and gradients --------------------------------------------------------------


@pytest.mark.parametrize("place", ["inside", "around"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_module_uses_its_weight_as_it_is_now(x: Tensor, place: str, backend: str) -> None:
    layer = torch.nn.Linear(2, 2, bias=False)
    decorated = region()(layer.forward) if place == "inside" else layer.forward
    function = compiled(decorated, backend)
    with region() if place == "around" else nullcontext():
        function(x)
        with torch.no_grad():
            layer.weight.fill_(2)
        assert torch.equal(function(x).float(), functional.linear(x.to(BRAIN), layer.weight.to(BRAIN)).float())


@pytest.mark.parametrize("place", ["inside", "around"])
@pytest.mark.parametrize("options", [{}, {"dtype": HALF}, {"ops": {"linear": "fp32"}}, {"ops": FULL_SOFTMAX}])
def test_gradients_of_a_compiled_function_are_the_eager_ones(place: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(8, 8), torch.randn(4, 8)

    def forward(x: Tensor) -> Tensor:
        return layer(torch.relu(layer(x))).softmax(1)

    def gradients(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        layer.zero_grad()
        with region(**options) if place == "around" else nullcontext():
            y = function(x)
        y.float().square().sum().backward()
        return [y.detach(), layer.weight.grad.clone(), layer.bias.grad.clone()]  # type: ignore[union-attr]

    function = region(**options)(forward) if place == "inside" else forward
    for found, reference in zip(gradients(compiled(function)), gradients(function), strict=True):
        assert found.dtype is reference.dtype
        assert torch.allclose(found, reference, rtol=0.02, atol=0.02 * float(reference.abs().max()))


@pytest.mark.parametrize("ops", [FULL_MM, {"mm": "lower_precision_fp", "matmul": "fp32", "linear": "fp32"}])
def test_backward_of_a_compiled_function_runs_in_the_eager_dtypes(ops: dict[str, str]) -> None:
    torch.manual_seed(0)
    w, x = torch.nn.Parameter(torch.randn(16, 16)), torch.randn(4, 16)

    def gradient(function: Callable[[Tensor], Tensor]) -> Tensor:
        w.grad = None
        with region(ops=ops):
            y = function(x)
        y.sum().backward()
        assert w.grad is not None
        return w.grad

    def forward(x: Tensor) -> Tensor:
        return functional.linear(x, w)

    assert torch.equal(gradient(compiled(forward)), gradient(forward))


def test_a_disabled_island_in_a_compiled_function_has_the_eager_gradient() -> None:
    torch.manual_seed(0)
    w, x = torch.nn.Parameter(torch.randn(16, 16)), torch.randn(4, 16).bfloat16().requires_grad_()

    def island(x: Tensor) -> Tensor:
        with mpamp.autocast("cpu", enabled=False):
            return x.float() @ w.t()

    def gradient(function: Callable[[Tensor], Tensor]) -> Tensor:
        w.grad = None
        with region():
            y = function(x)
        y.sum().backward()
        assert w.grad is not None
        return w.grad

    assert torch.equal(gradient(compiled(island)), gradient(island))


# -- torch.compile: graph breaks -----------------------------------------------------------------------


@pytest.fixture
def compiled_files() -> Iterator[list[str]]:
    """List the file of every frame that Dynamo starts to compile."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    found: list[str] = []
    original = InstructionTranslator.run

    def run(self: Any) -> Any:
        found.append(self.f_code.co_filename)
        return original(self)

    InstructionTranslator.run = run  # type: ignore[method-assign]
    yield found
    InstructionTranslator.run = original  # type: ignore[method-assign]


def _broken(x: Tensor) -> Any:
    y = x.mm(x)
    torch._dynamo.graph_break()
    return y, x.to(BRAIN).softmax(0)


def _broken_in_the_region(x: Tensor, ops: Any) -> Any:
    with mpamp.autocast("cpu", ops=ops):
        y = x.mm(x)
        torch._dynamo.graph_break()
        return y, x.to(BRAIN).softmax(0)


class Opaque:
    """Calls an op from a frame that Dynamo can't compile."""

    def __call__(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        for _ in (y for y in [1]):
            x = x.to(BRAIN).softmax(0)
            try:
                torch._dynamo.graph_break()
            finally:
                x = x.to(BRAIN).softmax(0)
        return x


dynamo_may_warn = pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")


@dynamo_may_warn
@pytest.mark.parametrize("ops", [None, FULL_SOFTMAX, FULL_MM])
def test_region_around_a_function_with_a_graph_break(x: Tensor, ops: Any, compiled_files: list[str]) -> None:
    function = torch.compile(_broken, backend="eager")
    with region(ops=ops):
        assert dtypes(function(x)) == dtypes(_broken(x))
    assert {Path(file).name for file in compiled_files} <= {Path(__file__).name}
    assert compiled_files


@dynamo_may_warn
@pytest.mark.parametrize("ops", [None, FULL_SOFTMAX, FULL_MM])
def test_region_in_a_function_with_a_graph_break(x: Tensor, ops: Any) -> None:
    function = torch.compile(_broken_in_the_region, backend="eager")
    assert dtypes(function(x, ops)) == in_region(x, ops=ops)
    assert x.mm(x).dtype is FULL


@dynamo_may_warn
@pytest.mark.parametrize("ops", [FULL_SOFTMAX, FULL_MM])
def test_kernels_are_not_compiled_after_a_graph_break_in_a_region(
    x: Tensor, ops: Any, compiled_files: list[str]
) -> None:
    torch.compile(_broken_in_the_region, backend="eager")(x, ops)
    assert [file for file in compiled_files if "mpamp kernel" in file] == []
    assert compiled_files


@dynamo_may_warn
def test_kernels_called_from_an_eager_part_are_not_compiled(x: Tensor, compiled_files: list[str]) -> None:
    opaque = Opaque()
    function = torch.compile(lambda x: opaque(x + 1) + 1, backend="eager")
    with region(ops=FULL_SOFTMAX):
        assert function(x).dtype is FULL
    assert [file for file in compiled_files if "mpamp" in Path(file).name or "/mpamp/" in file] == []
    assert compiled_files


@pytest.mark.parametrize("changes", [False, True], ids=["as-made", "rules-changed-since"])
def test_region_entered_in_an_eager_part_is_not_compiled(x: Tensor, compiled_files: list[str], changes: bool) -> None:
    prebuilt = region(ops=FULL_SOFTMAX)

    def function(x: Tensor) -> Any:
        torch._dynamo.graph_break()
        with prebuilt:
            torch._dynamo.graph_break()
            return probe(x)

    if changes:  # the region is prepared again as it is entered
        mpamp.set_op_rules("cpu", {"sigmoid": "fp32"})
    try:
        assert dtypes(torch.compile(function, backend="eager")(x)) == [BRAIN, FULL]
    finally:
        mpamp.set_op_rules("cpu", None)
    assert {Path(file).name for file in compiled_files} == {Path(__file__).name}
    assert not torch.is_autocast_enabled("cpu")


# -- Inductor ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_inductor_runs_a_region_and_its_backward(x: Tensor) -> None:
    layer = torch.nn.Linear(2, 2)

    def function(x: Tensor) -> Tensor:
        with mpamp.autocast("cpu", ops={"softmax": "fp32"}):
            return layer(x).softmax(1)

    found = compiled(function, "inductor")(x)
    assert found.dtype is FULL
    assert torch.allclose(found, function(x), rtol=0.02)
    found[:, 0].sum().backward()
    assert layer.weight.grad is not None


SHARED_CACHE = """
import sys, torch, mpamp
def function(x):
    return x.softmax(0)
ops = {"softmax": sys.argv[1]} if sys.argv[1] != "default" else None
with mpamp.autocast("cpu", ops=ops) if sys.argv[1] != "plain" else torch.autocast("cpu", torch.bfloat16):
    y = torch.compile(function, fullgraph=True)(torch.ones(4, 4, dtype=torch.bfloat16))
from torch._dynamo.utils import counters
print(y.dtype, counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"])
"""


def run_python(code: str, *arguments: str, **environment: str) -> str:
    """Run a program in a fresh process and return what it printed."""
    environment = {**os.environ, "PYTHONPATH": search_path(ROOT), **environment}
    command = [sys.executable, "-c", code, *arguments]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.slow
def test_processes_with_different_tables_share_a_disk_cache(tmp_path: Path) -> None:
    def run(rule: str) -> list[str]:
        return run_python(SHARED_CACHE, rule, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)).split()

    assert run("lower_precision_fp")[0] == "torch.bfloat16"
    assert run("fp32")[0] == "torch.float32"
    assert run("default")[0] == "torch.bfloat16"
    assert run("plain")[0] == "torch.bfloat16"
    again = run("fp32")
    assert again[0] == "torch.float32"
    assert max(map(int, again[1:])) > 0, "one table's second process should hit the disk cache"


# -- torch.export, torch.jit ---------------------------------------------------------------------------


class Net(torch.nn.Module):
    """Two layers and a softmax in a region, with a disabled island."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.second, self.options = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), options

    def forward(self, x: Tensor) -> Any:
        with mpamp.autocast("cpu", **self.options):
            hidden = self.first(x)
            with mpamp.autocast("cpu", enabled=False):
                island = self.second(hidden.float())
            return (hidden, island, *probe(x))


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("decomposes", [False, True])
@pytest.mark.parametrize("options", REGIONS.values(), ids=REGIONS)
def test_export_keeps_the_dtypes(x: Tensor, options: dict[str, Any], decomposes: bool) -> None:
    net = Net(**options)
    program = torch.export.export(net, (x,), strict=False)
    if decomposes:
        program = program.run_decompositions()
    found, reference = program.module()(x), net(x)
    assert dtypes(found) == dtypes(reference)
    assert all(torch.allclose(a, b, rtol=0.02) for a, b in zip(found, reference, strict=True))
    assert x.mm(x).dtype is FULL


def test_export_of_a_decorated_forward(x: Tensor) -> None:
    class Decorated(torch.nn.Module):
        @region(ops=FULL_SOFTMAX)
        def forward(self, x: Tensor) -> Any:
            return probe(x)

    assert dtypes(torch.export.export(Decorated(), (x,), strict=False).module()(x)) == [BRAIN, FULL]


@pytest.mark.parametrize("options", [{}, {"ops": FULL_SOFTMAX}])
def test_strict_export_keeps_the_dtypes(x: Tensor, options: dict[str, Any]) -> None:
    net = Net(**options)
    assert dtypes(torch.export.export(net, (x,), strict=True).module()(x)) == dtypes(net(x))


def test_exported_program_runs_in_its_own_dtypes_inside_a_region(x: Tensor) -> None:
    module = torch.export.export(Net(ops=FULL_SOFTMAX), (x,), strict=False).module()
    with region(dtype=HALF):
        assert dtypes(module(x)) == [BRAIN, FULL, BRAIN, FULL]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("place", ["inside", "around"])
@pytest.mark.parametrize("options", [{}, {"ops": FULL_SOFTMAX}, {"dtype": HALF}])
def test_jit_trace_and_freeze_keep_the_dtypes(x: Tensor, options: dict[str, Any], place: str) -> None:
    class Probe(torch.nn.Module):
        def forward(self, x: Tensor) -> Any:
            with region(**options) if place == "inside" else nullcontext():
                return probe(x)

    with torch.no_grad(), region(**options) if place == "around" else nullcontext():
        traced = torch.jit.freeze(torch.jit.trace(Probe().eval(), x, check_trace=False))
    assert dtypes(traced(x)) == in_region(x, **options)


# -- torch.func ----------------------------------------------------------------------------------------


def _loss(x: Tensor) -> Tensor:
    return x.mm(x).float().square().sum()


@pytest.mark.parametrize("options", [{}, {"ops": FULL_MM}, {"dtype": HALF}])
@pytest.mark.parametrize("place", ["inside", "around"])
def test_func_grad_is_autograd_s(x: Tensor, options: dict[str, Any], place: str) -> None:
    leaf = x.clone().requires_grad_()
    with region(**options):
        loss = _loss(leaf)
    loss.backward()
    function = region(**options)(_loss) if place == "inside" else _loss
    with region(**options) if place == "around" else nullcontext():
        found = torch.func.grad(function)(x)
    assert found.dtype is FULL
    assert torch.allclose(found, leaf.grad, rtol=0.01)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{}, {"ops": {"mm": "fp32", "bmm": "fp32", "matmul": "fp32"}}, {"dtype": HALF}, {"dtype": FULL}]
)
@pytest.mark.parametrize("place", ["inside", "around"])
def test_vmap_runs_in_the_region_s_dtype(x: Tensor, options: dict[str, Any], place: str) -> None:
    def mm(x: Tensor) -> Tensor:
        return x.mm(x)

    function = region(**options)(mm) if place == "inside" else mm
    with region(**options) if place == "around" else nullcontext():
        assert torch.vmap(function)(torch.stack([x, x])).dtype is in_region(x, **options)[0]


@pytest.mark.parametrize("options", [{}, {"ops": FULL_SOFTMAX}])
def test_vmap_of_a_region_follows_the_table(x: Tensor, options: dict[str, Any]) -> None:
    function = region(**options)(lambda x: x.to(BRAIN).softmax(0))
    assert torch.vmap(function)(torch.stack([x, x])).dtype is in_region(x, **options)[1]


@pytest.mark.parametrize("options", [{}, {"ops": FULL_MM}])
def test_jvp_runs_in_the_region_s_dtype(x: Tensor, options: dict[str, Any]) -> None:
    with region(**options):
        value, tangent = torch.func.jvp(lambda x: x.mm(x), (x,), (torch.ones_like(x),))
    assert value.dtype is tangent.dtype is in_region(x, **options)[0]


def test_vmap_of_grad_over_samples(x: Tensor) -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))

    def loss(w: Tensor, sample: Tensor) -> Tensor:
        return functional.linear(sample, w).float().sum()

    with region():
        found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, x)
    assert found.dtype is FULL
    assert torch.allclose(found, x.to(BRAIN).float()[:, None, :].expand(2, 2, 2))


# -- Activation checkpointing --------------------------------------------------------------------------


class Recorder(torch.nn.Module):
    """A block that notes the dtypes that it runs in, each time that it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(2, 2), list[list[torch.dtype]]()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        low = hidden.to(BRAIN).softmax(0)
        self.seen.append([hidden.dtype, low.dtype])
        return (hidden + low).float().tanh()


@pytest.fixture
def block() -> Recorder:
    return Recorder()


@pytest.fixture
def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def assert_recomputed_alike(block: Recorder, runs: int = 2) -> None:
    assert len(block.seen) == runs
    assert all(seen == block.seen[0] for seen in block.seen), block.seen


KINDS = {"reentrant": True, "non-reentrant": False}
both_kinds = pytest.mark.parametrize("reentrant", KINDS.values(), ids=KINDS)
OPS_REGIONS = {name: o for name, o in REGIONS.items() if name != "mm to fp32"} | {
    "linear to fp32": {"ops": {"linear": "fp32"}}
}


recomputed_regions = pytest.mark.parametrize(
    "options", [pytest.param(options, id=name) for name, options in OPS_REGIONS.items()]
)


@both_kinds
@recomputed_regions
def test_recompute_runs_in_the_forward_s_dtypes(
    block: Recorder, leaf: Tensor, options: dict[str, Any], reentrant: bool
) -> None:
    with region(**options):
        y = checkpoint(block, leaf, use_reentrant=reentrant)
    y.sum().backward()
    assert_recomputed_alike(block)


@both_kinds
@recomputed_regions
def test_recompute_inside_the_region_runs_in_the_forward_s_dtypes(
    block: Recorder, leaf: Tensor, options: dict[str, Any], reentrant: bool
) -> None:
    with region(**options):
        checkpoint(block, leaf, use_reentrant=reentrant).sum().backward()
    assert_recomputed_alike(block)


@both_kinds
@pytest.mark.parametrize("backward", OPS_REGIONS.values(), ids=OPS_REGIONS)
@pytest.mark.parametrize("forward", [{}, {"ops": FULL_SOFTMAX}, {"ops": {"linear": "fp32"}}, None])
def test_recompute_in_another_region_runs_in_the_forward_s_dtypes(
    block: Recorder, leaf: Tensor, forward: Any, backward: dict[str, Any], reentrant: bool
) -> None:
    with nullcontext() if forward is None else region(**forward):
        y = checkpoint(block, leaf, use_reentrant=reentrant)
    with region(**backward):
        y.sum().backward()
    assert_recomputed_alike(block)


@both_kinds
@pytest.mark.parametrize("forward", [{}, {"ops": FULL_SOFTMAX}, {"ops": {"linear": "fp32"}}])
def test_recompute_in_plain_torch_autocast_runs_in_the_forward_s_dtypes(
    block: Recorder, leaf: Tensor, forward: Any, reentrant: bool
) -> None:
    with region(**forward):
        y = checkpoint(block, leaf, use_reentrant=reentrant)
    with torch.autocast("cpu", HALF):
        y.sum().backward()
    assert_recomputed_alike(block)


@both_kinds
@pytest.mark.parametrize("cache_enabled", [True, False])
@pytest.mark.parametrize("backward", [None, {}, {"ops": {"exp": "fp32"}}], ids=["no region", "default", "rules"])
def test_recompute_of_plain_torch_autocast_is_torch_s(
    leaf: Tensor, cache_enabled: bool, backward: Any, reentrant: bool
) -> None:
    seen: list[torch.dtype] = []

    def function(x: Tensor) -> Tensor:
        y = x.half().exp()  # our CPU table runs it in float32 in a float16 region, torch's own doesn't list it
        seen.append(y.dtype)
        return y.float().square()

    with region(dtype=HALF):
        assert leaf.half().exp().dtype is FULL
    with torch.autocast("cpu", HALF, cache_enabled=cache_enabled):
        y = checkpoint(function, leaf, use_reentrant=reentrant)
    with nullcontext() if backward is None else region(**backward):
        y.sum().backward()
    assert seen == [HALF, HALF]


@both_kinds
def test_recompute_on_another_thread_runs_in_the_forward_s_dtypes(
    block: Recorder, leaf: Tensor, reentrant: bool
) -> None:
    with region(ops=FULL_SOFTMAX):
        y = checkpoint(block, leaf, use_reentrant=reentrant)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(y.sum().backward).result()
    assert_recomputed_alike(block)


@both_kinds
def test_recompute_on_another_thread_while_a_region_is_open_here(
    block: Recorder, leaf: Tensor, reentrant: bool
) -> None:
    with region(ops={"linear": "fp32"}):
        y = checkpoint(block, leaf, use_reentrant=reentrant)
    with region(ops=FULL_SOFTMAX), ThreadPoolExecutor(1) as pool:
        pool.submit(y.sum().backward).result()
        assert dtypes(probe(leaf)) == [BRAIN, FULL]
    assert_recomputed_alike(block)


@both_kinds
def test_two_forwards_with_different_tables_and_one_backward(x: Tensor, reentrant: bool) -> None:
    blocks, total = [Recorder() for _ in range(4)], torch.zeros(())
    for block, ops in zip(blocks, [None, FULL_SOFTMAX, {"linear": "fp32"}, None], strict=True):
        with region(ops=ops):
            total = total + checkpoint(block, x.clone().requires_grad_(), use_reentrant=reentrant).sum()
    total.backward()
    for block in blocks:
        assert_recomputed_alike(block)


@both_kinds
def test_backward_in_reverse_order_of_the_forwards(x: Tensor, reentrant: bool) -> None:
    blocks, losses = [Recorder() for _ in range(3)], []
    for block, ops in zip(blocks, [FULL_SOFTMAX, None, {"linear": "fp32"}], strict=True):
        with region(ops=ops):
            losses.append(checkpoint(block, x.clone().requires_grad_(), use_reentrant=reentrant).sum())
    for loss in (losses[1], losses[2], losses[0]):
        loss.backward()
    for block in blocks:
        assert_recomputed_alike(block)


@both_kinds
def test_nested_regions_are_recomputed_each_with_its_table(x: Tensor, reentrant: bool) -> None:
    outer, inner, after = Recorder(), Recorder(), Recorder()
    with region(ops=FULL_SOFTMAX):
        y = checkpoint(outer, x.clone().requires_grad_(), use_reentrant=reentrant)
        with region(ops={"linear": "fp32"}):
            y = checkpoint(inner, y, use_reentrant=reentrant)
        y = checkpoint(after, y, use_reentrant=reentrant)
    y.sum().backward()
    for block in (outer, inner, after):
        assert_recomputed_alike(block)


@both_kinds
def test_a_default_region_inside_one_with_rules_is_recomputed_with_the_default(x: Tensor, reentrant: bool) -> None:
    block = Recorder()
    with region(ops=FULL_SOFTMAX), region():
        y = checkpoint(block, x.clone().requires_grad_(), use_reentrant=reentrant)
    y.sum().backward()
    assert block.seen == [[BRAIN, BRAIN]] * 2


@both_kinds
def test_region_inside_a_checkpointed_function(block: Recorder, leaf: Tensor, reentrant: bool) -> None:
    y = checkpoint(region(ops=FULL_SOFTMAX)(block.forward), leaf, use_reentrant=reentrant)
    y.sum().backward()
    assert block.seen == [[BRAIN, FULL]] * 2


@both_kinds
def test_region_inside_a_checkpointed_function_inside_a_region(block: Recorder, leaf: Tensor, reentrant: bool) -> None:
    after = Recorder()

    def function(x: Tensor) -> Tensor:
        return after(region(ops=FULL_SOFTMAX)(block.forward)(x))

    with region(ops={"linear": "fp32"}):
        y = checkpoint(function, leaf, use_reentrant=reentrant)
    y.sum().backward()
    assert block.seen == [[BRAIN, FULL]] * 2
    assert after.seen == [[FULL, BRAIN]] * 2


def test_nested_checkpoint_is_recomputed_with_the_table(leaf: Tensor) -> None:
    outer, inner = Recorder(), Recorder()

    def function(x: Tensor) -> Tensor:
        return checkpoint(inner, outer(x), use_reentrant=False)  # type: ignore[no-any-return]

    with region(ops=FULL_SOFTMAX):
        y = checkpoint(function, leaf, use_reentrant=False)
    y.sum().backward()
    assert {tuple(seen) for seen in outer.seen + inner.seen} == {(BRAIN, FULL)}
    assert len(inner.seen) >= 2


@both_kinds
def test_recompute_after_many_other_regions(block: Recorder, leaf: Tensor, reentrant: bool) -> None:
    with region(ops=FULL_SOFTMAX):
        y = checkpoint(block, leaf, use_reentrant=reentrant)
    for _ in range(1100):
        with region(ops={"linear": "fp32"}):
            pass
    y.sum().backward()
    assert_recomputed_alike(block)


@both_kinds
def test_recompute_after_process_wide_rules_have_changed(block: Recorder, leaf: Tensor, reentrant: bool) -> None:
    with region():
        y = checkpoint(block, leaf, use_reentrant=reentrant)
    try:
        mpamp.set_op_rules("cpu", FULL_SOFTMAX)
        y.sum().backward()
    finally:
        mpamp.set_op_rules("cpu", None)
    assert_recomputed_alike(block)


@both_kinds
def test_recompute_of_plain_torch_autocast_after_process_wide_rules_have_changed(leaf: Tensor, reentrant: bool) -> None:
    seen: list[torch.dtype] = []

    def function(x: Tensor) -> Tensor:
        seen.append(x.half().exp().dtype)  # our CPU table runs it in float32 in a float16 region, torch's doesn't
        return x.half().exp().float().square()

    with region(dtype=HALF):
        leaf.half().exp()
    with torch.autocast("cpu", HALF):
        y = checkpoint(function, leaf, use_reentrant=reentrant)
    try:
        mpamp.set_op_rules("cpu", FULL_SOFTMAX)
        y.sum().backward()
    finally:
        mpamp.set_op_rules("cpu", None)
    assert seen == [HALF, HALF]


@both_kinds
def test_another_thread_s_regions_do_not_reach_a_recompute_in_plain_torch_autocast(
    leaf: Tensor, reentrant: bool
) -> None:
    seen: list[torch.dtype] = []

    def function(x: Tensor) -> Tensor:
        seen.append(x.half().exp().dtype)
        return x.half().exp().float().square()

    def other() -> None:
        with region(ops={"exp": "fp32"}):
            for _ in range(50):
                leaf * 2

    def forward() -> Tensor:
        with torch.autocast("cpu", HALF):
            return checkpoint(function, leaf, use_reentrant=reentrant)  # type: ignore[no-any-return]

    with ThreadPoolExecutor(1) as pool:
        y = pool.submit(forward).result()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(other).result()
    y.sum().backward()
    assert seen == [HALF, HALF]


@both_kinds
def test_another_thread_s_regions_do_not_reach_a_recompute(block: Recorder, leaf: Tensor, reentrant: bool) -> None:
    def other() -> None:
        with region(ops={"linear": "fp32"}):
            for _ in range(500):  # autograd numbers each thread's nodes from 0
                leaf * 2

    with region(ops=FULL_SOFTMAX):
        y = checkpoint(block, leaf, use_reentrant=reentrant)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(other).result()
    y.sum().backward()
    assert_recomputed_alike(block)


@both_kinds
def test_forwards_on_two_threads_are_recomputed_each_with_its_table(x: Tensor, reentrant: bool) -> None:
    blocks, barrier = [Recorder(), Recorder()], threading.Barrier(2)

    def forward(number: int) -> Tensor:
        leaf = x.clone().requires_grad_()
        with region(ops=[FULL_SOFTMAX, {"linear": "fp32"}][number]):
            barrier.wait()
            y = checkpoint(blocks[number], leaf, use_reentrant=reentrant)
            for _ in range(50):  # autograd numbers each thread's nodes from 0: both regions have these numbers
                leaf * 2
            barrier.wait()
        return y.sum()  # type: ignore[no-any-return]

    with ThreadPoolExecutor(2) as pool:
        losses = list(pool.map(forward, range(2)))
    for loss in losses:
        loss.backward()
    for block in blocks:
        assert_recomputed_alike(block)


@both_kinds
def test_a_region_left_out_of_order_leaves_no_trace_in_later_recomputes(
    block: Recorder, leaf: Tensor, reentrant: bool
) -> None:
    first, second = region(ops=FULL_SOFTMAX), region(ops={"relu": "fp32"})
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    with region():
        y = checkpoint(block, leaf, use_reentrant=reentrant)
    y.sum().backward()
    assert_recomputed_alike(block)


@both_kinds
def test_gradients_with_recompute_are_those_without(x: Tensor, reentrant: bool) -> None:
    block = Recorder()

    def gradients(run: Callable[..., Tensor]) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        block.zero_grad()
        with region(ops=FULL_SOFTMAX):
            y = run(block, run(block, leaf))
        y.sum().backward()
        return [leaf.grad, *(p.grad.clone() for p in block.parameters())]  # type: ignore[union-attr, list-item]

    reference = gradients(lambda f, x: f(x))
    for a, b in zip(gradients(lambda f, x: checkpoint(f, x, use_reentrant=reentrant)), reference, strict=True):
        assert torch.allclose(a, b, rtol=0.02, atol=0.02 * float(b.abs().max()))


@pytest.mark.parametrize("place", ["inside", "around"])
def test_checkpoint_inside_a_compiled_function(x: Tensor, place: str) -> None:
    layer = torch.nn.Linear(2, 2)

    def block(x: Tensor) -> Tensor:
        return layer(x).softmax(1)

    def function(x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]

    def run(wrap: Callable[..., Any]) -> list[Tensor]:
        layer.zero_grad()
        body = region(ops=FULL_SOFTMAX)(function) if place == "inside" else function
        with region(ops=FULL_SOFTMAX) if place == "around" else nullcontext():
            y = wrap(body)(x.clone().requires_grad_())
        y[:, 0].float().sum().backward()
        return [y.detach(), layer.weight.grad.clone()]  # type: ignore[union-attr]

    for a, b in zip(run(compiled), run(lambda f: f), strict=True):
        assert a.dtype is b.dtype
        assert torch.allclose(a, b, rtol=0.02, atol=1e-3)


def test_double_backward_inside_a_region_follows_the_float_reference(x: Tensor) -> None:
    def penalty(**options: Any) -> Tensor:
        leaf = x.clone().requires_grad_()
        with region(**options):
            (grad,) = torch.autograd.grad(leaf.mm(leaf).float().pow(2).sum(), leaf, create_graph=True)
            grad.square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    reference = penalty(enabled=False)
    assert torch.allclose(penalty(), reference, rtol=0.05, atol=0.05 * float(reference.abs().max()))


def test_backward_inside_a_region_runs_in_the_dtypes_of_plain_torch(x: Tensor) -> None:
    def gradient(around: AbstractContextManager[Any]) -> Tensor:
        leaf = x.clone().requires_grad_()
        low = leaf.to(BRAIN)
        y = low.softmax(0)
        with around:
            y.backward(torch.ones_like(y))
        assert leaf.grad is not None
        return leaf.grad

    assert torch.equal(gradient(region(ops=FULL_SOFTMAX)), gradient(nullcontext()))


# -- Fake tensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cuda", "xpu"])
@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_fake_tensors_follow_the_device_s_table(device: str, dtype: torch.dtype) -> None:
    with FakeTensorMode(), mpamp.autocast(device, dtype):
        x, low = torch.empty(4, 4, device=device), torch.empty(4, 4, device=device, dtype=dtype)
        found = {
            "mm": x.mm(x).dtype, "linear": functional.linear(x, x).dtype, "softmax": low.softmax(0).dtype,
            "exp": low.exp().dtype, "layer_norm": functional.layer_norm(low, (4,)).dtype, "norm": low.norm().dtype,
            "mse": functional.mse_loss(low, low).dtype, "fft": torch.fft.fft(low).dtype,
            "inv": torch.linalg.inv(low).dtype, "cat": torch.cat([low, x]).dtype, "relu": low.relu().dtype,
        }  # fmt: skip
    expected = {**dict.fromkeys(found, FULL), "mm": dtype, "linear": dtype, "relu": dtype, "fft": torch.complex64}
    assert found == expected


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_fake_tensors_follow_ops_of_a_region(device: str) -> None:
    with FakeTensorMode():
        low = torch.empty(4, 4, device=device, dtype=HALF)
        with mpamp.autocast(device, HALF, ops={"softmax": "fallthrough", "relu": "fp32"}):
            assert [low.softmax(0).dtype, low.relu().dtype] == [HALF, FULL]
            with mpamp.autocast(device, HALF):
                assert [low.softmax(0).dtype, low.relu().dtype] == [FULL, HALF]


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_bce_is_banned_on_cuda_and_runs_in_float32_on_xpu(device: str) -> None:
    with FakeTensorMode(), mpamp.autocast(device, HALF):
        low = torch.empty(4, device=device, dtype=HALF)
        if device == "cuda":
            with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
                functional.binary_cross_entropy(low, low)
        else:
            assert functional.binary_cross_entropy(low, low).dtype is FULL


# -- DTensor -------------------------------------------------------------------------------------------


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("torch is built without gloo")
    from torch.distributed.device_mesh import init_device_mesh

    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"ops": FULL_SOFTMAX}, {"ops": FULL_MM}, {"dtype": HALF}, {"enabled": False}])
def test_dtensor_follows_the_region(mesh: Any, x: Tensor, options: dict[str, Any]) -> None:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    sharded = distribute_tensor(x, mesh, [Shard(0)])
    with region(**options):
        found = probe(sharded)
    assert all(isinstance(t, DTensor) for t in found)
    assert dtypes(found) == in_region(x, **options)


def test_dtensor_parameters_get_float32_gradients(mesh: Any, x: Tensor) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    weight = torch.nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Replicate()]))
    with region():
        for _ in range(2):
            y = functional.linear(distribute_tensor(x, mesh, [Shard(0)]), weight)
            assert y.dtype is BRAIN
            y.sum().backward()
    assert isinstance(weight.grad, DTensor)
    assert weight.grad.dtype is FULL


def test_dtensor_parameter_that_changes_is_not_stale(mesh: Any, x: Tensor) -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    weight = torch.nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Replicate()]))
    data = distribute_tensor(x, mesh, [Replicate()])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with region():
        before = functional.linear(data, weight)
        before.sum().backward()
        optimizer.step()
        after = functional.linear(data, weight)
    assert not torch.equal(before.to_local(), after.to_local())
