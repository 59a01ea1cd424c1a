"""Exported programs: the dtypes and values of the eager module, here and in a process that doesn't have mpamp."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode, make_fx
from torch.nn import functional
from torch.utils import _pytree

import mpamp
from tests import processes
from tests.torches import needs_torchs_kernels

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*lru_cache.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*assigned during export:UserWarning"),
]
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
Tensor = torch.Tensor
FULL_LINEAR, FULL_SOFTMAX = {"linear": "fp32"}, {"softmax": "fp32"}


def region(**options: Any) -> mpamp.Region:
    return mpamp.autocast("cpu", **options)


def plain(dtype: torch.dtype = BRAIN, enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype, enabled=enabled)


def _autocast_state() -> Any:
    devices = ("cpu", "cuda", "xpu", "ipu", "maia", "mtia")
    states = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
    return states, torch.is_autocast_cache_enabled()


OUTSIDE = _autocast_state()


class Model(nn.Module):
    """Layers, and what to do with them."""

    def __init__(self, run: Callable[[Model, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run = run
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.lstm, self.gru = nn.LSTM(4, 4), nn.GRU(4, 4)
        self.attention, self.encoder = nn.MultiheadAttention(4, 2), nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


# -- What the modules do -----------------------------------------------------------------------------


def own_rows(m: Model, x: Tensor) -> Any:
    """Ops that torch's own tables don't list, or cast otherwise."""
    with region():
        low = m.first(x)
        resized = functional.interpolate(low[None, None], (3, 3), mode="bicubic", antialias=True)
        joined = torch.index_add(x, 0, torch.arange(4), low)
        return torch.linalg.det(low[None]), joined, resized, torch.fft.hfft2(low), torch.linalg.norm(low)


def rules(m: Model, x: Tensor) -> Any:
    with region(ops=FULL_LINEAR):
        outputs = m.first(x), (x @ x).softmax(0)
    with region(ops=FULL_SOFTMAX):
        return *outputs, m.first(x), (x @ x).softmax(0)


def half(m: Model, x: Tensor) -> Any:
    """The processor's float16 rows: what overflows runs in float32."""
    with region(dtype=HALF):
        low = m.first(x)
        return low, low.sum(), low.exp(), low.norm(), low.pow(2), low.softmax(0), functional.layer_norm(low, (4,))


def nested(m: Model, x: Tensor) -> Any:
    with region():
        outer = m.first(x)
        with region(dtype=HALF):
            lower = m.second(x)
        with region(enabled=False):
            off = m.second(x)
        with region(dtype=FULL):
            full = m.first(outer), x @ x
        with region(ops=FULL_LINEAR):
            ruled = m.second(outer)
        again = m.second(outer)
    return outer, lower, off, *full, ruled, again, m.first(x)


def plain_inside(m: Model, x: Tensor) -> Any:
    with region(ops=FULL_SOFTMAX):
        with plain(enabled=False):
            off = m.first(x), (x @ x).to(BRAIN).softmax(0)
        with plain(HALF):
            on = m.first(x), (x @ x).softmax(0)
        return *off, *on, m.first(x)


def plain_outside(m: Model, x: Tensor) -> Any:
    with plain():
        before = m.first(x), m.first(x).softmax(0)
        with region(ops=FULL_SOFTMAX):
            inside = m.first(x), m.first(x).softmax(0)
        with region(enabled=False):
            off = m.second(x)
        return *before, *inside, off, m.first(x).softmax(0)


def off_outside(m: Model, x: Tensor) -> Any:
    with region(enabled=False):
        off = m.first(x)
        with plain():
            on = m.first(x), m.first(x).softmax(0)
            with region(ops=FULL_LINEAR):
                return off, *on, m.first(x), x @ x


def composites(m: Model, x: Tensor) -> Any:
    """Ops without a row, made of others that have one."""
    with region():
        attended = m.attention(x, x, x)
        products = torch.einsum("ij,kj->ik", x, x), torch.tensordot(x, x, 1), torch.inner(x, x)
        return *products, m.lstm(x)[0], m.gru(x)[0], *attended, m.encoder(x)


def kinds(m: Model, x: Tensor) -> Any:
    """Casts of every policy, calls of every kind: promote, float64, in place, no floating argument."""
    with region():
        low, double = m.first(x), x.double()
        written = torch.zeros(4, 4)
        written[0] = low[0]
        written += low
        picked = torch.nn.functional.embedding(torch.arange(2), m.first.weight)
        losses = functional.mse_loss(low, x), functional.cross_entropy(low, torch.arange(4))
        return torch.cat([x, low]), torch.stack([x, low]), double @ double, written, picked, *losses, m.norm(low)


def sizes_from_data(m: Model, x: Tensor) -> Any:
    with region():
        low = m.first(x)
        chosen = low[low.sum(-1) > -100]
        return chosen, m.second(chosen.float()), x.repeat_interleave(torch.tensor([1, 2, 1, 1]), 0) @ x


def branches(m: Model, x: Tensor) -> Any:
    def inside(x: Tensor) -> Tensor:
        with region(ops=FULL_SOFTMAX):
            return m.first(x).softmax(0)

    chosen = torch.cond(x.sum() > 0, inside, inside, (x,))
    with region():
        return chosen, torch.cond(x.sum() > 0, m.first, m.second, (x,))


def grad_modes(m: Model, x: Tensor) -> Any:
    with region():
        with torch.no_grad():
            frozen = m.first(x)
        trained = m.second(frozen)
    with torch.no_grad(), region(dtype=HALF):
        return frozen, trained, m.first(x)


@mpamp.autocast("cpu", ops=FULL_SOFTMAX)
def decorated(m: Model, x: Tensor) -> Any:
    return m.first(x), (x @ x).softmax(0)


def made_before(m: Model, x: Tensor) -> Any:
    """Regions that aren't made while the program is traced."""
    with RULED, OFF:
        off = x @ x
    with region(dtype=HALF), RULED:
        return off, x @ x, (x @ x).softmax(0)


RULED, OFF = region(ops=FULL_SOFTMAX), region(enabled=False)
PLACES = (nested, plain_inside, plain_outside, off_outside, branches, grad_modes, decorated)
OPS = (own_rows, rules, half, composites, kinds, sizes_from_data)
PROGRAMS = {f.__name__: f for f in (*OPS, *PLACES)}

# -- Running them ------------------------------------------------------------------------------------

WORKER = """
import json, sys, torch
sys.modules["mpamp"] = None  # importing it is an error
torch.set_num_threads(1)
for line in sys.stdin:
    folder = line.strip()
    try:
        outputs = torch.export.load(folder + "/program.pt2").module()(*torch.load(folder + "/inputs.pt"))
        torch.save([t.detach() for t in torch.utils._pytree.tree_leaves(outputs)], folder + "/outputs.pt")
        print(json.dumps("done"), flush=True)
    except Exception as error:
        print(json.dumps(repr(error)), flush=True)
"""


@pytest.fixture(scope="module")
def worker() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-W", "ignore", "-c", WORKER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def elsewhere(worker: subprocess.Popen[str], tmp_path: Path) -> Callable[..., list[Tensor]]:
    """Return a function that runs an exported program in a process without mpamp."""

    def run(program: Any, *inputs: Tensor) -> list[Tensor]:
        assert worker.stdin is not None
        assert worker.stdout is not None
        torch.export.save(program, tmp_path / "program.pt2")
        torch.save(inputs, tmp_path / "inputs.pt")
        worker.stdin.write(f"{tmp_path}\n")
        worker.stdin.flush()
        assert json.loads(worker.stdout.readline()) == "done"
        return torch.load(tmp_path / "outputs.pt")  # type: ignore[no-any-return]

    return run


@pytest.fixture
def x() -> Tensor:
    return torch.linspace(0.1, 1, 16).reshape(4, 4)


def leaves(outputs: Any) -> list[Tensor]:
    return [t.detach() for t in _pytree.tree_leaves(outputs)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("run", PROGRAMS.values(), ids=PROGRAMS)
def test_the_casts_are_in_the_graph(run: Any, strict: bool, x: Tensor, elsewhere: Any) -> None:
    model = Model(run).eval()
    expected = leaves(model(x))
    program = torch.export.export(model, (x,), strict=strict)
    decomposed = program.run_decompositions()
    for each in (program, decomposed):
        assert_same(leaves(each.module()(x)), expected)
        assert_same(elsewhere(each, x), expected)
    assert _autocast_state() == OUTSIDE


def test_regions_made_before_the_export(x: Tensor, elsewhere: Any) -> None:
    def run(m: Model, x: Tensor) -> Any:
        with plain():
            with OFF:
                off = x @ x
            with RULED:
                return off, x @ x, (x @ x).softmax(0)

    for model in (Model(made_before), Model(run)):
        program = torch.export.export(model, (x,), strict=False)
        assert_same(leaves(program.module()(x)), leaves(model(x)))
        assert_same(elsewhere(program, x), leaves(model(x)))


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("around", [{"ops": FULL_SOFTMAX}, {"dtype": HALF}, {"ops": FULL_LINEAR}], ids=str)
def test_a_region_around_the_export_is_in_the_graph(around: Any, strict: bool, x: Tensor, elsewhere: Any) -> None:
    def run(m: Model, x: Tensor) -> Any:
        inner = m.first(x), m.first(x).softmax(0), torch.einsum("ij,kj->ik", x, x)
        with region(enabled=False):
            off = m.first(x)
        with region():
            return *inner, off, m.first(x)

    model = Model(run)
    with region(**around):
        expected = leaves(model(x))
        program = torch.export.export(model, (x,), strict=strict)
    assert_same(leaves(program.module()(x)), expected)
    assert_same(elsewhere(program, x), expected)
    assert_same(elsewhere(program.run_decompositions(), x), expected)


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_a_training_program_with_dynamic_shapes(strict: bool, x: Tensor) -> None:
    def run(m: Model, x: Tensor) -> Any:
        with region(ops=FULL_SOFTMAX):
            return m.norm(m.first(x)), torch.einsum("ij,kj->ik", x, m.second(x)), m.second(x).softmax(0)

    def gradients(module: nn.Module, x: Tensor) -> tuple[Any, dict[str, Tensor | None]]:
        outputs = module(x)
        sum(o.float().square().sum() for o in outputs).backward()
        return leaves(outputs), {n: p.grad for n, p in module.named_parameters() if p.grad is not None}

    model, batch = Model(run), torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},), strict=strict)
    assert model.norm.num_batches_tracked == 0, "tracing must not run what it only looks at"
    y = torch.rand(7, 4)
    (outputs, found), (expected, wanted) = gradients(program.module(), y), gradients(model, y)
    assert_same(outputs, expected)
    assert (
        found.keys() == wanted.keys() == {f"{m}.{p}" for m in ("first", "second", "norm") for p in ("weight", "bias")}
    )
    assert_same([found[n] for n in wanted], list(wanted.values()))


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_ops_are_recorded_whole_where_nothing_in_them_is_cast(strict: bool, x: Tensor) -> None:
    def run(m: Model, x: Tensor) -> Any:
        with region():
            low = functional.dropout(m.norm(m.first(x)), 0.5)
            return low.reshape(-1).flatten(), torch.einsum("ij,kj->ik", low, low)

    graph = torch.export.export(Model(run), (x,), strict=strict).graph_module.submod_1.graph
    named = [str(n.target).removeprefix("aten.") for n in graph.nodes if n.op == "call_function"]
    assert [n for n in named if "assert" not in n] == [
        *["to.dtype"] * 3,
        "linear.default",
        "add_.Tensor" if "add_.Tensor" in named else "batch_norm.default",
        *(["batch_norm.default"] if "add_.Tensor" in named else []),
        "dropout.default",
        "reshape.default",
        "flatten.using_ints",
        "einsum.default",
    ]


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_an_exported_program_keeps_its_dtypes_inside_regions(strict: bool, x: Tensor) -> None:
    def run(m: Model, x: Tensor) -> Any:
        with region(ops=FULL_SOFTMAX):
            return m.first(x), m.first(x).softmax(0), m.first(x).relu() + 1

    program = torch.export.export(Model(run), (x,), strict=strict).module()
    for outer in (region(dtype=HALF), region(ops={"add": "fp32", "linear": "fp32"}), plain(HALF)):
        with outer:
            assert [t.dtype for t in program(x)] == [BRAIN, FULL, BRAIN]


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_rules_set_after_the_export_change_nothing(strict: bool, x: Tensor) -> None:
    program = torch.export.export(Model(decorated), (x,), strict=strict)
    mpamp.set_op_rules("cpu", {"linear": "fp32", "softmax": "lower_precision_fp"})
    try:
        for each in (program, program.run_decompositions()):
            assert [t.dtype for t in each.module()(x)] == [BRAIN, FULL]
    finally:
        mpamp.set_op_rules("cpu", None)


# -- What isn't ours -------------------------------------------------------------------------------------

UNTOUCHED = """
import sys, torch
from torch import nn
torch.manual_seed(0)
if sys.argv[1] == "mpamp":
    import mpamp
    with mpamp.autocast("cpu", ops={"softmax": "fp32"}), mpamp.autocast("cpu", dtype=torch.float16):
        torch.ones(2, 2) @ torch.ones(2, 2)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        y = torch.einsum("ij,kj->ik", x, self.norm(self.first(x)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.first(y).softmax(0)
            with torch.autocast("cpu", enabled=False):
                w = self.first(y)
            return z, w, torch.einsum("ij,kj->ik", x, x)

for strict in (False, True):
    try:
        program = torch.export.export(Model(), (torch.ones(4, 4),), strict=strict)
        print(program.graph_module.print_readable(print_output=False))
        print(program.run_decompositions().graph)
    except Exception as error:
        print(type(error), str(error)[:200])
"""


@pytest.mark.slow
@needs_torchs_kernels
def test_programs_without_regions_are_as_without_mpamp() -> None:
    def run(which: str) -> str:
        return processes.python("-W", "ignore", "-c", UNTOUCHED, which).stdout

    without = run("torch")
    assert "torch.bfloat16, True" in without
    assert run("mpamp") == without


def test_another_thread_exports(x: Tensor) -> None:
    """Its regions are its own, and so are those of a thread that runs meanwhile."""
    reached, finish, seen = threading.Event(), threading.Event(), []

    def run(m: Model, x: Tensor) -> Any:
        with region(ops=FULL_SOFTMAX):
            reached.set()
            assert finish.wait(60)
            return m.first(x), m.first(x).softmax(0)

    exporting = threading.Thread(target=lambda: seen.append(torch.export.export(Model(run), (x,), strict=False)))
    exporting.start()
    try:
        assert reached.wait(60)
        with region(dtype=FULL, ops=None):
            assert (x @ x).dtype is FULL
        with region(dtype=HALF):
            assert type(region()) is mpamp.Region
            assert (x @ x).dtype is HALF
        assert (x @ x).dtype is FULL
    finally:
        finish.set()
        exporting.join()
    assert [t.dtype for t in seen[0].module()(x)] == [BRAIN, FULL]


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_an_export_that_fails_leaves_nothing_behind(strict: bool, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(m: Model, x: Tensor) -> Any:
        with region(ops=FULL_SOFTMAX), plain(HALF):
            return m.first(x).relu()

    original = PreDispatchTorchFunctionMode.__torch_function__

    def failing(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "relu":
            raise KeyboardInterrupt
        return original(self, func, types, args, kwargs)

    monkeypatch.setattr(PreDispatchTorchFunctionMode, "__torch_function__", failing)
    with pytest.raises(KeyboardInterrupt):
        torch.export.export(Model(run), (x,), strict=strict)
    assert _autocast_state() == OUTSIDE
    assert (x @ x).dtype is FULL


# -- Other tracers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["inside", "around"])
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_make_fx_records_casts_and_no_kept_one(mode: Any, pre_dispatch: bool, place: str, x: Tensor) -> None:
    model = Model(lambda m, x: (m.first(x), m.first(x).softmax(0), torch.einsum("ij,kj->ik", x, x)))

    def function(weight: Tensor, x: Tensor) -> Any:
        with region(ops=FULL_SOFTMAX) if place == "inside" else nullcontext():
            return torch.func.functional_call(model, {"first.weight": weight}, (x,))

    weight = model.first.weight.detach().clone().requires_grad_()
    with region(ops=FULL_SOFTMAX):
        expected = leaves(model(x))  # keeps casts that must not be found in the graph
        with region(ops=FULL_SOFTMAX) if place == "around" else nullcontext():
            model(x)
            options = {"tracing_mode": mode, "pre_dispatch": pre_dispatch, "_allow_non_fake_inputs": True}
            graph = make_fx(function, **options)(weight, x)
    assert_same(leaves(graph(weight, x)), expected)
    zeros = graph(torch.zeros_like(weight), x)
    assert torch.equal(zeros[0].float(), model.first.bias.to(BRAIN).float().expand(4, 4)), "a kept cast is in the graph"


@pytest.mark.parametrize("place", ["inside", "around"])
def test_aot_export_records_casts(place: str, x: Tensor) -> None:
    from torch._functorch.aot_autograd import aot_export_module

    def run(m: Model, x: Tensor) -> Any:
        with region(ops=FULL_SOFTMAX) if place == "inside" else nullcontext():
            return m.first(x), m.first(x).softmax(0)

    model = Model(run)
    for pre_dispatch in (False, True):
        with torch.no_grad(), region(ops=FULL_SOFTMAX) if place == "around" else nullcontext():
            graph, _ = aot_export_module(model, (x,), trace_joint=False, pre_dispatch=pre_dispatch)
        arguments = [*dict(model.named_parameters()).values(), *dict(model.named_buffers()).values(), x]
        assert [t.dtype for t in graph(*arguments)[-2:]] == [BRAIN, FULL]


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True}], ids=str)
def test_an_lstm_has_the_dtype_that_its_fused_layer_has(options: dict[str, Any]) -> None:
    """On processors whose oneDNN has one in lower precision, which the rule stands for; programs have its steps."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.LSTM(4, 4, **options)

        def forward(self, x: torch.Tensor) -> Any:
            rules = {"mkldnn_rnn_layer": "lower_precision_fp"}
            with mpamp.autocast("cpu", dtype=torch.bfloat16, ops=rules), torch.no_grad():
                y, (h, c) = self.layer(x)
            return y, h, c

    net, x = Net(), torch.randn(3, 2, 4)
    found = torch.export.export(net, (x,), strict=False).module()(x)
    y, (h, c) = net.layer(x)
    for got, want in zip(found, (y, h, c), strict=True):
        assert (got.dtype, got.shape) == (torch.bfloat16, want.shape)
        assert torch.allclose(got.float(), want, atol=0.05)
