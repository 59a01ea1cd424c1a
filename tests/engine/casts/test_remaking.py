"""Casts that outlive regions, after an optimizer's step: one copy makes them all, and no graph is written into."""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import mpamp
from mpamp.devices import registry
from mpamp.engine.casts import remaking
from mpamp.engine.casts.cache import PERSISTENT_CACHE
from mpamp.testing import KernelCounter, WeightCastCounter
from tests.engine.casts.standins import Queues

pytestmark = pytest.mark.python_engine
BRAIN = torch.bfloat16
Tensor, Parameter = torch.Tensor, nn.Parameter


@pytest.fixture(autouse=True)
def cache_is_left_empty() -> Iterator[None]:
    mpamp.clear_cache()
    yield
    mpamp.clear_cache()


@pytest.fixture
def x() -> Tensor:
    return torch.linspace(-1, 1, 32).reshape(4, 8)


def region(**options: Any) -> mpamp.Region:
    return mpamp.autocast("cpu", dtype=BRAIN, **{"persistent_cache": True, **options})


def network(depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(8, 8), nn.Tanh())))


def casts_since(before: mpamp.CacheInfo) -> tuple[int, int]:
    """Return how many casts there were since, and how many of them a step has made."""
    now = mpamp.cache_info()
    return now.casts - before.casts, now.recasts - before.recasts


def train(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, autocast: Callable[[], Any]) -> None:
    optimizer.zero_grad()
    with autocast():
        loss = module(x).float().square().mean()
    loss.backward()
    optimizer.step(lambda: loss.detach())  # type: ignore[arg-type]


@contextlib.contextmanager
def profiled() -> Iterator[Counter[str]]:
    """Count every op that runs, and change nothing by it."""
    counts: Counter[str] = Counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        yield counts
    counts.update(event.name for event in profile.events())


def outputs(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a module gives with kept casts, and without."""
    with torch.no_grad():
        with region():
            found = module(x)
        with region(cache_enabled=False, persistent_cache=False):
            return found, module(x)


def entry_of(weight: Tensor) -> Any:
    return PERSISTENT_CACHE.entries[(id(weight), BRAIN)]


# -- How often -----------------------------------------------------------------------------------------

MODES: dict[str, dict[str, bool]] = {"plain": {"foreach": False, "fused": False}, "foreach": {"foreach": True}}
MODES["fused"] = {"fused": True}


@pytest.mark.parametrize("mode", MODES)
def test_a_step_makes_all_casts_by_one_copy(x: Tensor, mode: str) -> None:
    module = network()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, **MODES[mode])
    before = mpamp.cache_info()
    for step in range(1, 5):
        with profiled() as counts:
            train(module, optimizer, x, region)
        assert counts["aten::_foreach_copy_"] == 1
        assert casts_since(before) == (6 * (step + 1), 6 * step)  # the first use, and each step


def test_under_a_dispatch_mode_casts_are_dropped_and_it_sees_no_op(x: Tensor) -> None:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, foreach=False)
    train(module, optimizer, x, region)
    before = mpamp.cache_info()
    with KernelCounter() as kernels:
        optimizer.step()
    assert not [name for name in kernels.counts if "copy" in name or "empty" in name]
    assert (mpamp.cache_info().entries, casts_since(before)) == (0, (0, 0))
    assert torch.equal(*outputs(module, x))


def test_a_function_mode_sees_no_part_of_a_step(x: Tensor) -> None:
    seen: list[str] = []

    class Listens(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(getattr(function, "__name__", function)))
            return function(*args, **(kwargs or {}))

    def names(autocast: Callable[[], Any]) -> list[str]:
        module = network()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, foreach=False)
        train(module, optimizer, x, autocast)
        seen.clear()
        with Listens():
            optimizer.step()
        return list(seen)

    found, cleared = names(region), mpamp.clear_cache()
    assert cleared is None
    assert found == names(contextlib.nullcontext)


def test_without_a_mode_the_step_makes_the_casts_that_the_next_region_uses(x: Tensor) -> None:
    module = network()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
    train(module, optimizer, x, region)
    before = mpamp.cache_info()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        for _ in range(3):
            train(module, optimizer, x, region)
    assert casts_since(before) == (18, 18)
    assert sum(e.name == "aten::_foreach_copy_" for e in profile.events()) == 3


def test_two_dtypes_are_a_copy_each(x: Tensor) -> None:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with profiled() as counts:
        for _ in range(2):
            with region():
                loss = module(x).float().sum()
            with region(), mpamp.autocast("cpu", dtype=torch.float16, persistent_cache=True):
                loss = loss + module(x).float().sum()
            loss.backward()
            optimizer.step()
    assert counts["aten::_foreach_copy_"] == 4


def test_accumulation_casts_nothing(x: Tensor) -> None:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = mpamp.cache_info()
    for _ in range(2):
        for _ in range(4):
            with region():
                loss = module(x).float().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert casts_since(before) == (18, 12)


def test_a_step_of_one_optimizer_leaves_the_casts_of_the_other_s(x: Tensor) -> None:
    module = network(2)
    first, second = (torch.optim.SGD(module[i].parameters(), lr=0.1) for i in (0, 2))
    train(module, first, x, region)
    before = mpamp.cache_info()
    train(module, first, x, region)
    assert casts_since(before) == (2, 2)
    train(module, second, x, region)
    assert casts_since(before) == (4, 4)


def test_what_has_no_gradient_keeps_its_cast(x: Tensor) -> None:
    module = network(2)
    module[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([{"params": module[i].parameters()} for i in (0, 2)], lr=0.1, fused=True)
    with WeightCastCounter(module[0]) as casts:
        for _ in range(4):
            train(module, optimizer, x, region)
    assert casts.count == 2  # weight and bias, once ever


def test_a_skipped_step_casts_nothing(x: Tensor) -> None:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = mpamp.GradScaler("cpu", init_scale=2.0)
    with region():
        loss = module(x).float().sum()
    scaler.scale(loss * float("inf")).backward()
    before = mpamp.cache_info()
    scaler.step(optimizer)
    scaler.update()
    with region():
        module(x)
    assert casts_since(before) == (0, 0)
    optimizer.zero_grad()
    with region():
        scaler.scale(module(x).float().sum()).backward()
    scaler.step(optimizer)
    assert casts_since(before) == (6, 6)


def test_casts_that_nothing_uses_any_more_go(x: Tensor) -> None:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    train(module, optimizer, x, region)
    before = mpamp.cache_info()
    for kept in (0, 0):
        train(module, optimizer, x, lambda: region(persistent_cache=False))
        assert mpamp.cache_info().entries == kept
    assert casts_since(before)[1] == 0


def test_the_copy_writes_into_the_memory_that_the_casts_have(x: Tensor) -> None:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    train(module, optimizer, x, region)
    addresses = [entry_of(p).low.data_ptr() for p in module.parameters()]
    for _ in range(3):
        train(module, optimizer, x, region)
        assert [entry_of(p).low.data_ptr() for p in module.parameters()] == addresses


# -- Never stale ---------------------------------------------------------------------------------------

OPTIMIZERS = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and name not in ("Optimizer", "SparseAdam")
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (name, mode)
        for name, cls in OPTIMIZERS.items()
        for mode in MODES
        if mode == "plain" or mode in inspect.signature(cls.__init__).parameters
    ],
)
def test_training_gives_what_it_gives_without_kept_casts(x: Tensor, name: str, mode: str) -> None:
    cls: Any = OPTIMIZERS[name]
    known = inspect.signature(cls.__init__).parameters
    found, reference = network(), network()
    for module, options in ((found, {}), (reference, {"cache_enabled": False})):
        weights = [p for p in module.parameters() if name != "Muon" or p.dim() == 2]
        optimizer = cls(weights, lr=0.1, **{k: v for k, v in MODES[mode].items() if k in known})
        for _ in range(4):
            train(module, optimizer, x, lambda options=options: region(**options))
    for p, q in zip(found.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)
        assert (id(p), BRAIN) in PERSISTENT_CACHE.entries
        assert torch.equal(entry_of(p).low, p.detach().to(BRAIN))


class WritesData(torch.optim.Optimizer):
    """Writes past the version counters, and whether there is a gradient or not."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(1)


@pytest.mark.parametrize("requires_grad", [True, False], ids=["trainable", "frozen"])
def test_an_optimizer_that_raises_no_counter_is_seen(x: Tensor, requires_grad: bool) -> None:
    weight = Parameter(torch.zeros(8, 8), requires_grad=requires_grad)
    optimizer = WritesData([weight])
    before = mpamp.cache_info()
    for step in range(4):
        with region():
            assert torch.equal(
                functional.linear(x, weight), functional.linear(x.to(BRAIN), torch.full((8, 8), step).to(BRAIN))
            )
        optimizer.step()
    assert casts_since(before) == (5, 4)


def test_a_step_s_hook_that_writes_is_seen(x: Tensor) -> None:
    weight = Parameter(torch.zeros(8, 8), requires_grad=False)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.register_step_post_hook(lambda *_: weight.data.fill_(3))
    with region():
        functional.linear(x, weight)
        optimizer.step()
        assert torch.equal(
            functional.linear(x, weight), functional.linear(x.to(BRAIN), torch.full((8, 8), 3.0).to(BRAIN))
        )


def test_a_fused_op_without_an_optimizer_is_seen(x: Tensor) -> None:
    weight = Parameter(torch.zeros(8, 8))
    with region():
        functional.linear(x, weight)
        with torch.no_grad():
            torch._fused_sgd_(
                [weight], [torch.ones(8, 8)], [], weight_decay=0.0, momentum=0.0, lr=0.5, dampening=0.0,
                nesterov=False, maximize=False, is_first_step=False,
            )  # fmt: skip
        assert torch.equal(
            functional.linear(x, weight), functional.linear(x.to(BRAIN), torch.full((8, 8), -0.5).to(BRAIN))
        )


def test_a_step_of_an_alias_drops_the_cast(x: Tensor) -> None:
    weight = Parameter(torch.zeros(8, 8))
    master = Parameter(weight.data)
    master.grad = torch.ones(8, 8)
    with region():
        functional.linear(x, weight)
        torch.optim.SGD([master], lr=0.5, fused=True).step()
        assert mpamp.cache_info().entries == 0
        assert functional.linear(x, weight)[0, 0] == -0.5 * x[0].to(BRAIN).sum()


CHANGES: dict[str, Callable[[Parameter], Any]] = {
    "turned over": lambda w: setattr(w, "data", w.data.t()),
    "another shape": lambda w: setattr(w, "data", w.data.view(4, 16)),
    "other data": lambda w: setattr(w, "data", torch.ones(8, 8)),
    "freed": lambda w: w.untyped_storage().resize_(0),
    "part of it": lambda w: setattr(w, "data", w.data[:4]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_that_lies_otherwise_by_now_is_not_made_anew(x: Tensor, change: str) -> None:
    weight, other = Parameter(torch.zeros(8, 8)), Parameter(torch.zeros(8, 8))
    optimizer = WritesData([other])
    optimizer.add_param_group({"params": [weight]})
    with region():
        functional.linear(functional.linear(x, weight), other)
    CHANGES[change](weight)
    before = mpamp.cache_info()
    if change == "freed":
        optimizer.param_groups[1]["params"] = []
        remaking.remake([weight])
        optimizer.step()
    else:
        optimizer.step()
    assert casts_since(before) == (1, 1)
    assert (id(weight), BRAIN) not in PERSISTENT_CACHE.entries


def test_a_freed_weight_leaves_nothing(x: Tensor) -> None:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    train(module, optimizer, x, region)
    assert mpamp.cache_info().entries == 6
    del module[2:], optimizer
    assert mpamp.cache_info().entries == 2


def test_a_step_on_another_thread_makes_the_casts_of_all(x: Tensor) -> None:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with region():
        module(x).float().sum().backward()
    before = mpamp.cache_info()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(optimizer.step).result()
    assert mpamp.cache_info().entries == 6
    assert torch.equal(*outputs(module, x))
    assert casts_since(before) == (0, 0)  # of this thread


def test_a_write_of_another_thread_while_the_copy_is_made_is_seen(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = Parameter(torch.zeros(8, 8))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    foreach_copy = torch._foreach_copy_

    def meanwhile(lows: list[Tensor], weights: list[Tensor]) -> None:
        foreach_copy(lows, weights)
        thread = threading.Thread(target=lambda: (weight.data.fill_(5), mpamp.clear_cache()))
        thread.start()
        thread.join()

    with region():
        functional.linear(x, weight).sum().backward()
        monkeypatch.setattr("mpamp.engine.casts.remaking.foreach_copy_", meanwhile)
        optimizer.step()
        assert functional.linear(x, weight)[0, 0] == 5 * x[0].to(BRAIN).sum()


def test_a_write_that_raises_the_counter_meanwhile_is_seen(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = Parameter(torch.zeros(8, 8))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    foreach_copy = torch._foreach_copy_

    def meanwhile(lows: list[Tensor], weights: list[Tensor]) -> None:
        foreach_copy(lows, weights)
        with torch.no_grad():
            weight.fill_(5)

    with region():
        functional.linear(x, weight).sum().backward()
        monkeypatch.setattr("mpamp.engine.casts.remaking.foreach_copy_", meanwhile)
        optimizer.step()
        assert functional.linear(x, weight)[0, 0] == 5 * x[0].to(BRAIN).sum()


def test_a_step_inside_of_backward_is_seen(x: Tensor) -> None:
    module = network()
    reference = copy.deepcopy(module)
    for m, options in ((module, {}), (reference, {"cache_enabled": False})):
        for p in m.parameters():
            optimizer = torch.optim.SGD([p], lr=0.5)
            p.register_post_accumulate_grad_hook(lambda p, o=optimizer: (o.step(), o.zero_grad())[0])
        for _ in range(3):
            with region(**options):
                loss = m(x).float().square().sum()
            loss.backward()
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), reference.parameters(), strict=True))


def test_casts_made_by_a_step_in_inference_mode_can_be_trained_through(x: Tensor) -> None:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with region():
        y = module(x).float().sum()  # its graph is alive: other memory is used
    y.backward(retain_graph=True)
    with torch.inference_mode():
        optimizer.step()
    assert not any(entry_of(p).low.is_inference() for p in module.parameters())
    train(module, optimizer, x, region)


def test_a_step_in_a_transform_or_a_trace_drops_the_casts(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    train(module, optimizer, x, region)
    before = mpamp.cache_info()
    monkeypatch.setattr("mpamp.engine.casts.remaking.is_tracing", lambda: True)
    optimizer.step()
    assert (mpamp.cache_info().entries, casts_since(before)) == (0, (0, 0))


# -- Graphs that are alive -----------------------------------------------------------------------------


def both(run: Callable[[Callable[[], Any]], Any]) -> tuple[Any, Any]:
    """Return what a program gives in lasting regions, and under ``torch.autocast``."""
    return run(region), run(lambda: torch.autocast("cpu", BRAIN))


def test_a_retained_graph_gives_the_gradient_of_its_forward(x: Tensor) -> None:
    def run(autocast: Callable[[], Any]) -> list[Tensor]:
        module = network()
        inputs = x.clone().requires_grad_()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        with autocast():
            loss = module(inputs).float().square().sum()
        loss.backward(retain_graph=True)
        for _ in range(2):
            optimizer.step()
            loss.backward(retain_graph=True)
        with autocast():
            module(inputs).float().sum().backward()
        assert inputs.grad is not None
        return [inputs.grad, *(p.grad for p in module.parameters()), *module.parameters()]

    for found, expected in zip(*both(run), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("freezes", [False, True])
def test_two_optimizers_over_one_graph(x: Tensor, freezes: bool) -> None:
    """A generator's graph goes through the discriminator, which steps before that graph's backward pass."""

    def run(autocast: Callable[[], Any]) -> list[Tensor]:
        generator, discriminator = network(), network()
        steps = [torch.optim.Adam(m.parameters(), lr=0.1, fused=True) for m in (generator, discriminator)]
        for _ in range(3):
            if freezes:
                discriminator.requires_grad_(False)
            with autocast():
                fake = generator(x)
                verdict = discriminator(fake).float().sum()
            discriminator.requires_grad_(True)
            with autocast():
                loss = discriminator(torch.cat([fake.detach().float(), x])).float().square().sum()
            steps[1].zero_grad()
            loss.backward()
            steps[1].step()
            steps[0].zero_grad()
            verdict.backward()
            steps[0].step()
        return [*generator.parameters(), *discriminator.parameters()]

    for found, expected in zip(*both(run), strict=True):
        assert torch.equal(found, expected)


HOLDS: dict[str, Callable[[Tensor, Parameter], Any]] = {
    "linked": lambda x, w: functional.linear(x, w),
    "frozen": lambda x, w: functional.linear(x, w.requires_grad_(False)),
    "a frozen product": lambda x, w: torch.mm(x, w.requires_grad_(False)),
    "a view": lambda x, w: x @ w.T,
    "a frozen view": lambda x, w: x @ w.requires_grad_(False).T,
    "a part": lambda x, w: functional.linear(x, w[:4]),
    "a convolution": lambda x, w: functional.conv1d(x[None], w[:4, :4, None]),
}


@pytest.mark.parametrize("use", HOLDS)
def test_whatever_a_graph_holds_is_not_written_into(x: Tensor, use: str) -> None:
    weight = Parameter(torch.linspace(-1, 1, 64).reshape(8, 8))
    weight.grad = torch.ones(8, 8)
    x = x.requires_grad_()
    with region():
        y = HOLDS[use](x, weight)
        low = entry_of(weight).low
        expected, address = low.clone(), low.data_ptr()
        (reference,) = torch.autograd.grad(y.float().sum(), x, retain_graph=True)
        torch.optim.SGD([weight], lr=0.5, fused=True).step()
        assert torch.equal(low, expected)
        assert entry_of(weight).low.data_ptr() != address
        assert torch.equal(entry_of(weight).low, weight.detach().to(BRAIN))
        assert torch.equal(torch.autograd.grad(y.float().sum(), x)[0], reference)
        del y
        weight.grad = torch.ones(8, 8)
        address = entry_of(weight).low.data_ptr()
        functional.linear(x.detach(), weight)
        torch.optim.SGD([weight], lr=0.5, fused=True).step()
        assert entry_of(weight).low.data_ptr() == address  # free again


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_give_the_gradients_of_torch_s(x: Tensor, use_reentrant: bool) -> None:
    def run(autocast: Callable[[], Any]) -> list[Tensor]:
        module = network()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            with autocast():
                y = checkpoint(module, x.clone().requires_grad_(), use_reentrant=use_reentrant)
            y.float().square().sum().backward()
            optimizer.step()
        return list(module.parameters())

    for found, expected in zip(*both(run), strict=True):
        assert torch.equal(found, expected)


def test_without_memory_for_other_copies_the_next_use_casts(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise torch.OutOfMemoryError

    weight = Parameter(torch.ones(8, 8))
    weight.grad = torch.ones(8, 8)
    with region():
        y = functional.linear(x.requires_grad_() * 1, weight)  # its graph holds the cast
        with monkeypatch.context() as patch:
            patch.setattr(remaking.torch, "empty_like", refuse)
            torch.optim.SGD([weight], lr=0.5, fused=True).step()
        assert mpamp.cache_info().entries == 0
        assert torch.equal(functional.linear(x, weight), y * 0.5)


# -- Streams, and graphs that are recorded -------------------------------------------------------------


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> Queues:
    found = Queues()
    found.put_in_place(monkeypatch)
    monkeypatch.setattr(remaking, "_stream_check", lambda backend: found.number)
    return found


def use(weight: Tensor, queues: Queues, stream: int) -> int:
    """Use a weight on a stream; return where its cast is."""
    queues.current = stream
    found = PERSISTENT_CACHE.find(weight, BRAIN, queues.number)
    if found is None:
        found = PERSISTENT_CACHE.add(weight, BRAIN, queues.number)
    return found.data_ptr()


def step(weight: Parameter, queues: Queues, stream: int) -> None:
    queues.current = stream
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5, fused=True).step()


def test_on_one_stream_no_event_is_made(queues: Queues) -> None:
    weight = Parameter(torch.ones(8, 8))
    address = use(weight, queues, 5)
    for _ in range(3):
        step(weight, queues, 5)
        assert use(weight, queues, 5) == address
    assert queues.log == []


def test_what_another_stream_may_still_read_is_not_written_into(queues: Queues) -> None:
    weight = Parameter(torch.ones(8, 8))
    addresses = [use(weight, queues, 0), use(weight, queues, 7)]
    old = entry_of(weight).low
    step(weight, queues, 0)
    assert use(weight, queues, 0) not in addresses
    assert torch.equal(old, torch.ones(8, 8, dtype=BRAIN))


def test_a_copy_made_on_one_stream_is_waited_for_on_another(queues: Queues) -> None:
    weight = Parameter(torch.ones(8, 8))
    address = use(weight, queues, 0)
    step(weight, queues, 7)
    assert queues.log == [("records", 7)]
    assert use(weight, queues, 7) != address
    assert queues.log == [("records", 7)]
    use(weight, queues, 0)
    assert queues.log == [("records", 7), ("waits for 7", 0), ("holds", 0)]


def test_while_a_graph_is_recorded_the_casts_are_dropped(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    train(module, optimizer, x, region)
    before = mpamp.cache_info()
    monkeypatch.setattr(registry, "_capture_check", lambda backend: lambda: True)
    optimizer.step()
    assert (mpamp.cache_info().entries, casts_since(before)) == (0, (0, 0))
