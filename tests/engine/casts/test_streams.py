"""A kept cast that is still queued on one stream, used on another: first with counted stand-ins, then on a card."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

import mpamp
from mpamp.backends.cpu import CpuBackend
from mpamp.engine.casts import streams
from mpamp.engine.casts.cache import COMPILED, REGION_CACHE, CastCache
from mpamp.engine.python.caster import keeper
from tests.engine.casts.standins import Queues

BRAIN = torch.bfloat16
Parameter, Tensor = torch.nn.Parameter, torch.Tensor


@pytest.fixture(autouse=True)
def cache_is_left_empty() -> Iterator[None]:
    yield
    mpamp.clear_cache()


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> Queues:
    if COMPILED:
        pytest.skip("the compiled engine asks torch for streams, not the stand-ins")
    found = Queues()
    found.put_in_place(monkeypatch)
    return found


@pytest.fixture(params=[True, False], ids=["trainable", "frozen"])
def weight(request: pytest.FixtureRequest) -> Parameter:
    return Parameter(torch.ones(4, 4), requires_grad=request.param)


def use(cache: CastCache, weight: Tensor, queues: Queues, stream: int) -> bool:
    """Use a weight on a stream; tell whether it was cast anew."""
    queues.current = stream
    if cache.find(weight, BRAIN, queues.number) is not None:
        return False
    cache.add(weight, BRAIN, queues.number)
    return True


def test_one_stream_makes_no_event(weight: Parameter, queues: Queues) -> None:
    cache = CastCache()
    assert [use(cache, weight, queues, 5) for _ in range(4)] == [True, False, False, False]
    with torch.no_grad():
        weight.add_(1)
    assert use(cache, weight, queues, 5)
    assert queues.log == []


def test_a_second_stream_waits_once_and_holds_the_memory(weight: Parameter, queues: Queues) -> None:
    cache = CastCache()
    used = [use(cache, weight, queues, stream) for stream in (0, 0, 7, 7, 0, 7)]
    assert used == [True, False, False, False, False, False]
    assert queues.log == [("records", 0), ("waits for 0", 7), ("holds", 7)]


def test_each_further_stream_waits(weight: Parameter, queues: Queues) -> None:
    cache = CastCache()
    for stream in (0, 7, 8, 7, 8, 0):
        use(cache, weight, queues, stream)
    assert [what for what in queues.log if what[0] == "waits for 0"] == [("waits for 0", 7), ("waits for 0", 8)]


def test_a_cast_of_a_side_stream_is_marked_when_it_is_made(weight: Parameter, queues: Queues) -> None:
    cache, other = CastCache(), Parameter(torch.ones(4))
    use(cache, other, queues, 0)
    use(cache, weight, queues, 7)
    assert queues.log == [("records", 7)]  # by the time it is used elsewhere, the stream may be gone
    assert not use(cache, weight, queues, 0)
    assert queues.log[1:] == [("waits for 7", 0), ("holds", 0)]


def test_a_new_cast_is_waited_for_anew(weight: Parameter, queues: Queues) -> None:
    cache = CastCache()
    for _ in range(2):
        use(cache, weight, queues, 0)
        use(cache, weight, queues, 7)
        with torch.no_grad():
            weight.add_(1)
    assert queues.log.count(("waits for 0", 7)) == 2


def test_without_a_way_to_hold_the_memory_it_is_cast_anew(
    weight: Parameter, queues: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(tensor: Tensor, stream: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(Tensor, "record_stream", refuse)
    cache = CastCache()
    assert [use(cache, weight, queues, stream) for stream in (0, 7, 7, 0)] == [True, True, False, True]


class Streaming(CpuBackend):
    """The processor, as a device with the streams of ``queues`` that records graphs while ``is_capturing``."""

    is_capturing = False
    queues: Queues

    def capture_check(self) -> Callable[[], bool]:
        return lambda: self.is_capturing

    def stream_check(self) -> Callable[[Tensor], int]:
        return self.queues.number


def test_a_backend_s_streams_reach_the_cache(weight: Parameter, queues: Queues) -> None:
    backend = Streaming()
    backend.queues = queues
    _, kept = keeper(backend)
    low = kept(weight, BRAIN, REGION_CACHE)
    queues.current = 7
    assert kept(weight, BRAIN, REGION_CACHE).data_ptr() == low.data_ptr()
    assert queues.log == [("records", 0), ("waits for 0", 7), ("holds", 7)]


def test_nothing_is_kept_or_served_while_a_graph_is_recorded(queues: Queues) -> None:
    backend, scope = Streaming(), SimpleNamespace(cache=REGION_CACHE)
    backend.queues = queues
    may_keep, _ = keeper(backend)
    assert may_keep(scope)
    backend.is_capturing = True
    assert not may_keep(scope)


def test_the_processor_has_one_queue() -> None:
    assert CpuBackend().stream_check() is None


# -- On a card -----------------------------------------------------------------------------------------

SIZE = 2048
IN_BOTH_CACHES = pytest.mark.parametrize("persistent", [False, True], ids=["region", "persistent"])
OF_BOTH_KINDS = pytest.mark.parametrize("requires_grad", [True, False], ids=["trainable", "frozen"])


def card() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, torch.accelerator.current_device_index())


def be_slow() -> None:
    """Give the current stream work for some ten milliseconds."""
    a = torch.ones(4096, 4096, device=card())
    for _ in range(30):
        a = torch.mm(a, a).mul_(0)


def region(persistent: bool) -> mpamp.Region:
    return mpamp.autocast(card().type, dtype=BRAIN, persistent_cache=persistent)


def on_card(requires_grad: bool) -> tuple[Parameter, Tensor, Tensor]:
    """Return a weight, an argument, and what ``linear`` gives of them."""
    weight = Parameter(torch.randn(SIZE, SIZE, device=card()), requires_grad=requires_grad)
    x = torch.ones(8, SIZE, device=card(), dtype=BRAIN)
    reference = functional.linear(x, weight.detach().to(BRAIN))
    be_slow()  # warms up too
    torch.accelerator.synchronize()
    return weight, x, reference


@pytest.mark.accelerator
@IN_BOTH_CACHES
@OF_BOTH_KINDS
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("first", ["side", "main"])
def test_another_stream_s_cast_is_waited_for(first: str, grad: bool, requires_grad: bool, persistent: bool) -> None:
    side = torch.Stream(device=card())
    for _ in range(3):
        weight, x, reference = on_card(requires_grad)
        junk = [torch.full((SIZE, SIZE), 7.0, device=card(), dtype=BRAIN) for _ in range(4)]
        torch.accelerator.synchronize()
        del junk  # what a cast's memory holds before it is made
        with torch.set_grad_enabled(grad), region(persistent):
            if first == "side":
                with side:
                    be_slow()
                    functional.linear(x, weight)
                found = functional.linear(x, weight)
            else:
                be_slow()
                functional.linear(x, weight)
                with side:
                    found = functional.linear(x, weight)
        torch.accelerator.synchronize()
        assert torch.equal(found, reference)
        mpamp.clear_cache()


@pytest.mark.accelerator
@OF_BOTH_KINDS
def test_a_persistent_cast_is_waited_for_in_the_next_region(requires_grad: bool) -> None:
    side = torch.Stream(device=card())
    weight, x, reference = on_card(requires_grad)
    with torch.no_grad():
        with side, region(True):
            be_slow()
            functional.linear(x, weight)
        with region(True):
            found = functional.linear(x, weight)
    torch.accelerator.synchronize()
    assert torch.equal(found, reference)


@pytest.mark.accelerator
def test_the_memory_of_a_dropped_cast_is_not_given_away_while_a_stream_reads_it() -> None:
    side = torch.Stream(device=card())
    weight, x, reference = on_card(False)
    with torch.no_grad():
        with region(True):
            functional.linear(x, weight)
        torch.accelerator.synchronize()
        with side, region(True):
            be_slow()
            found = functional.linear(x, weight)
        mpamp.clear_cache()
        taken = [torch.full((SIZE, SIZE), 9.0, device=card(), dtype=BRAIN) for _ in range(4)]
    torch.accelerator.synchronize()
    assert len(taken) == 4
    assert torch.equal(found, reference)


# torch says so of any gradient that comes from another stream than its leaf was made on.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.accelerator
@IN_BOTH_CACHES
def test_gradients_over_two_streams_are_those_of_one(persistent: bool) -> None:
    side = torch.Stream(device=card())
    weight, x, _ = on_card(True)

    def gradient(other: torch.Stream) -> Tensor:
        weight.grad = None
        with region(persistent):
            first = functional.linear(x, weight)
            with other:
                second = functional.linear(x, weight)
            torch.accelerator.current_stream().wait_stream(other)
            loss = (first + second).float().square().mean()
        loss.backward()
        torch.accelerator.synchronize()
        mpamp.clear_cache()
        assert weight.grad is not None
        return weight.grad

    reference = gradient(torch.accelerator.current_stream())
    assert torch.equal(gradient(side), reference)


@pytest.mark.accelerator
@IN_BOTH_CACHES
def test_one_stream_makes_no_event_on_a_card(persistent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x, _ = on_card(True)
    made: list[object] = []
    monkeypatch.setattr(streams, "_record", lambda *args: made.append(args))
    monkeypatch.setattr(streams, "_homes", {})
    for _ in range(3):
        with region(persistent):
            functional.linear(functional.linear(x, weight), weight)
    assert made == []


@pytest.mark.place("cuda")
@IN_BOTH_CACHES
@OF_BOTH_KINDS
def test_a_graph_recorded_after_a_warm_up_on_a_side_stream_reads_the_weight(
    requires_grad: bool, persistent: bool
) -> None:
    weight, x, reference = on_card(requires_grad)
    side = torch.cuda.Stream()
    with torch.no_grad(), region(persistent):
        functional.linear(x, weight)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                functional.linear(x, weight)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = functional.linear(x, weight)
        graph.replay()
        torch.accelerator.synchronize()
        assert torch.equal(captured, reference)
        weight.data.mul_(2)  # nothing that was kept before goes into the graph
        graph.replay()
        torch.accelerator.synchronize()
        assert torch.equal(captured, 2 * reference)
