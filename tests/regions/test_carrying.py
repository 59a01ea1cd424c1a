"""What ran in a scope carries it: recompute, Functions and threads have the forward's state."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

import mpamp
from mpamp.engine.marks import NO_MARK
from mpamp.engine.resolving import mark_here, scopes_here
from mpamp.engine.scope import PLAIN, THREAD
from mpamp.regions.carrying import Carried, carrying

BF16, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
linear = torch.nn.functional.linear

FORWARD: dict[str, tuple[Callable[[], Any], torch.dtype]] = {
    "none": (lambda: mpamp.autocast("cpu", enabled=False), FULL),
    "default": (lambda: mpamp.autocast("cpu", BF16), BF16),
    "float16": (lambda: mpamp.autocast("cpu", HALF), HALF),
    "float32": (lambda: mpamp.autocast("cpu", FULL), FULL),
    "rules": (lambda: mpamp.autocast("cpu", BF16, ops={"linear": "fp32"}), FULL),
    "other rules": (lambda: mpamp.autocast("cpu", HALF, ops={"gelu": "fp32"}), HALF),
    "no cache": (lambda: mpamp.autocast("cpu", BF16, cache_enabled=False), BF16),
    "torch": (lambda: torch.autocast("cpu", BF16), BF16),
    "torch, no cache": (lambda: torch.autocast("cpu", BF16, cache_enabled=False), BF16),
}
both = pytest.mark.parametrize(("forward", "backward"), [(f, b) for f in FORWARD for b in FORWARD])
KINDS = {"reentrant": True, "non-reentrant": False}
kinds = pytest.mark.parametrize("reentrant", KINDS.values(), ids=KINDS)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    with mpamp.autocast("cpu"):
        pass  # torch's own classes are served from the first region on
    yield
    assert not THREAD.state.entries
    assert mark_here() is NO_MARK
    assert not any(scope is not None for scope in THREAD.state.scopes[:-1])
    assert not torch.is_autocast_enabled("cpu")


def leaf(*shape: int) -> torch.Tensor:
    return torch.ones(shape or (2, 4), requires_grad=True)


def on_a_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    assert results, "it raised"
    return results[0]


@both
@kinds
def test_a_recompute_has_its_forward_s_state(forward: str, backward: str, reentrant: bool) -> None:
    weight, seen = torch.nn.Parameter(torch.ones(4, 4)), []
    make, dtype = FORWARD[forward]

    def block(x: torch.Tensor) -> torch.Tensor:
        y = linear(x, weight)
        seen.append((y.dtype, torch.is_autocast_enabled("cpu")))
        return y.float().square()

    with make():
        loss = checkpoint(block, leaf(), use_reentrant=reentrant).sum()
    with FORWARD[backward][0]():
        loss.backward()
    assert [d for d, _ in seen] == [dtype, dtype]
    assert seen[0] == seen[1]
    assert weight.grad is not None


@kinds
def test_a_float32_region_is_recomputed_without_a_warning(reentrant: bool) -> None:
    """torch's checkpoint enters torch.autocast in float32 again, which warns and switches it off."""
    seen: list[torch.dtype] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        low = x.to(BF16)
        seen.append(linear(low, low).dtype)  # the region runs it in float32, without one it is bfloat16
        return x.square()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with mpamp.autocast("cpu", FULL):
            loss = checkpoint(block, leaf(), use_reentrant=reentrant).sum()
        loss.backward()
    assert seen == [FULL, FULL]


class ByHand(torch.autograd.Function):
    """A checkpoint as other libraries write it: it keeps what torch tells of autocast, and enters that again."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        ctx.settings = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        ctx.cache_enabled = torch.is_autocast_cache_enabled()
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        enabled, dtype = ctx.settings
        x = x.detach().requires_grad_()
        with (
            torch.enable_grad(),
            torch.autocast("cpu", enabled=enabled, dtype=dtype, cache_enabled=ctx.cache_enabled),
        ):
            y = ctx.function(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


@pytest.mark.parametrize("forward", [name for name in FORWARD if name != "float32"])  # torch takes no such region
@pytest.mark.parametrize("backward", FORWARD)
@pytest.mark.parametrize("is_threaded", [False, True])
def test_a_checkpoint_of_another_library_has_the_forward_s_table(
    forward: str, backward: str, is_threaded: bool
) -> None:
    weight, seen = torch.nn.Parameter(torch.ones(4, 4)), []
    make, dtype = FORWARD[forward]

    def block(x: torch.Tensor) -> torch.Tensor:
        y = linear(x, weight)
        seen.append(y.dtype)
        return y.float().square()

    with make():
        loss = ByHand.apply(block, leaf()).sum()

    def run() -> bool:
        with FORWARD[backward][0]():
            loss.backward()
        return True

    assert on_a_thread(run) if is_threaded else run()
    assert seen == [dtype, dtype]


class Torchs(torch.autograd.Function):
    """A Function with torch's own decorators."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, seen: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.seen = seen
        seen.append(linear(x, x).dtype)
        return x * 1

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.seen.append(linear(grad, grad).dtype)
        return None, grad


def test_a_thread_may_inherit_the_state_of_a_recompute() -> None:
    seen: list[torch.dtype] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append(on_a_thread(mpamp.inherit_regions(lambda: linear(x, x).dtype)))
        return x.square()

    with mpamp.autocast("cpu", HALF, ops={"gelu": "fp32"}):
        loss = ByHand.apply(block, leaf()).sum()
    loss.backward()
    assert seen == [HALF, HALF]


@pytest.mark.parametrize("forward", [name for name in FORWARD if name != "float32"])
@pytest.mark.parametrize("backward", FORWARD)
def test_torch_s_own_custom_bwd_has_the_forward_s_table(forward: str, backward: str) -> None:
    seen: list[torch.dtype] = []
    make, dtype = FORWARD[forward]
    with make():
        loss = Torchs.apply(seen, leaf()).sum()
    with FORWARD[backward][0]():
        loss.backward()
    assert seen == [dtype, dtype]


@kinds
def test_regions_inside_of_a_checkpoint_don_t_give_it_their_table(reentrant: bool) -> None:
    """The node that asks for the recompute may have been made in an inner region."""
    weight, seen = torch.nn.Parameter(torch.ones(4, 4)), []

    def block(x: torch.Tensor) -> torch.Tensor:
        y = linear(x, weight)
        with mpamp.autocast("cpu", BF16, ops={"linear": "fp32"}):
            z = linear(y, weight)
        seen.append((y.dtype, z.dtype))
        return z.square()

    with mpamp.autocast("cpu", BF16):
        checkpoint(block, leaf(), use_reentrant=reentrant).sum().backward()
    assert seen == [(BF16, FULL), (BF16, FULL)]


@kinds
@pytest.mark.parametrize("outer", ["default", "rules"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a reentrant one's forward has no grad
def test_checkpoints_nest(outer: str, reentrant: bool) -> None:
    weight, seen = torch.nn.Parameter(torch.ones(4, 4)), []

    def inner(x: torch.Tensor, name: str) -> torch.Tensor:
        y = linear(x, weight)
        seen.append((name, y.dtype))
        return y.float().square()

    def block(x: torch.Tensor) -> torch.Tensor:
        with mpamp.autocast("cpu", HALF, ops={"gelu": "fp32"}):
            y = checkpoint(inner, x, "first", use_reentrant=reentrant)
        return checkpoint(inner, y, "second", use_reentrant=reentrant)

    make, dtype = FORWARD[outer]
    with make():
        loss = checkpoint(block, leaf(), use_reentrant=reentrant).sum()
    loss.backward()
    assert set(seen) == {("first", HALF), ("second", dtype)}
    assert len(seen) > 4


@kinds
def test_a_recompute_on_a_thread_with_regions_of_its_own(reentrant: bool) -> None:
    weight, seen = torch.nn.Parameter(torch.ones(4, 4)), []

    def block(x: torch.Tensor) -> torch.Tensor:
        y = linear(x, weight)
        seen.append(y.dtype)
        return y.float().square()

    with mpamp.autocast("cpu", BF16, ops={"linear": "fp32"}):
        loss = checkpoint(block, leaf(), use_reentrant=reentrant).sum()

    def run() -> tuple[torch.dtype, torch.dtype]:
        with mpamp.autocast("cpu", HALF, ops={"gelu": "fp32"}):
            before = linear(weight, weight).dtype
            loss.backward()
            return before, linear(weight, weight).dtype

    assert on_a_thread(run) == (HALF, HALF)
    assert seen == [FULL, FULL]


@kinds
def test_nothing_is_remembered_of_regions_past(reentrant: bool) -> None:
    """Sixteen thousand regions between forward and backward once made it forget the table."""
    weight, seen = torch.nn.Parameter(torch.ones(4, 4)), []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append(linear(x, weight).dtype)
        return linear(x, weight).float().square()

    with mpamp.autocast("cpu", BF16, ops={"linear": "fp32"}):
        loss = checkpoint(block, leaf(), use_reentrant=reentrant).sum()
    region = mpamp.autocast("cpu", BF16, ops={"gelu": "fp32"})
    for _ in range(20_000):
        with region:
            pass
    loss.backward()
    assert seen == [FULL, FULL]


@kinds
def test_the_rules_of_a_checkpoint_are_those_of_its_forward(reentrant: bool) -> None:
    seen: list[torch.dtype] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append(linear(x, x).dtype)
        return x.square()

    with mpamp.autocast("cpu", BF16):
        loss = checkpoint(block, leaf(), use_reentrant=reentrant).sum()
    try:
        mpamp.set_op_rules("cpu", {"linear": "fp32"})
        loss.backward()
    finally:
        mpamp.set_op_rules("cpu", None)
    assert seen == [BF16, BF16]


@kinds
def test_a_graph_that_is_gone_holds_no_table(reentrant: bool) -> None:
    def run() -> weakref.ref[Any]:
        region = mpamp.autocast("cpu", BF16, ops={"linear": "fp32", "erfinv": "fp32"})
        with region:
            scope = scopes_here()[0]
            checkpoint(lambda x: linear(x, x).square(), leaf(), use_reentrant=reentrant).sum().backward()
        return weakref.ref(scope.mark)  # type: ignore[union-attr]

    mark = run()
    mpamp.autocast.__globals__["_regions"].clear()
    gc.collect()
    assert mark() is None


def test_carrying_restores_every_part_on_another_thread() -> None:
    def state() -> tuple[Any, ...]:
        low = torch.ones(2, 2)
        enabled, cache = torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()
        return linear(low, low).dtype, enabled, torch.get_autocast_dtype("cpu"), cache, mark_here()

    for make, _ in FORWARD.values():
        with make():
            here, carried = state(), carrying(state)
        assert on_a_thread(carried) == here
        assert on_a_thread(lambda carried=carried: (carried(), state())[1]) == state()  # type: ignore[misc]


def test_what_was_outside_of_regions_is_so_inside_of_one() -> None:
    carried = Carried()
    with mpamp.autocast("cpu", BF16, ops={"gelu": "fp32"}):
        with carried.restored():
            assert THREAD.state.scopes[0] is PLAIN
            assert mark_here() is NO_MARK
            assert linear(leaf(), leaf()).dtype is FULL
            with torch.autocast("cpu", BF16):
                assert scopes_here()[0] in (None, PLAIN)
                with mpamp.autocast("cpu", BF16, ops={"linear": "fp32"}):
                    assert linear(leaf(), leaf()).dtype is FULL
        assert linear(leaf(), leaf()).dtype is BF16


def test_modules_that_have_torch_s_generator_by_name_get_the_carrying_one() -> None:
    from torch.distributed._composable import checkpoint_activation
    from torch.utils import checkpoint as module

    names = [f"_checkpoint_without_reentrant_generator{end}" for end in ("_impl", "")]  # the first from torch 2.14 on
    name = next(name for name in names if hasattr(module, name))
    assert getattr(checkpoint_activation, name) is getattr(module, name)
    assert hasattr(getattr(module, name), "__wrapped__")


def test_a_function_of_no_region_keeps_none() -> None:
    y = Torchs.apply([], leaf())
    assert y.grad_fn._mpamp_scopes == ()
    with mpamp.autocast("cpu", BF16):
        y = Torchs.apply([], leaf())
    assert y.grad_fn._mpamp_scopes[0].table is mpamp.get_op_table("cpu")


def test_backward_costs_nothing_for_regions_past() -> None:
    def calls(regions: int) -> int:
        for number in range(regions):
            with mpamp.autocast("cpu", BF16, ops={"gelu": "fp32"} if number % 2 else {"silu": "fp32"}):
                pass
        with mpamp.autocast("cpu", BF16):
            loss = checkpoint(lambda x: linear(x, x).square(), leaf(), use_reentrant=False).sum()
        count = 0

        def profile(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(profile)
        try:
            loss.backward()
        finally:
            sys.setprofile(None)
        return count

    calls(1)
    assert calls(1) == calls(2000)


class Ours(torch.autograd.Function):
    @staticmethod
    @mpamp.custom_fwd
    def forward(ctx: Any, seen: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.seen = seen
        seen.append(linear(x, x).dtype)
        return x * 1

    @staticmethod
    @mpamp.custom_bwd
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.seen.append(linear(grad, grad).dtype)
        return None, grad


# Dynamo of torch 2.11 looks at the gradients of what the recomputed block gives.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")
@pytest.mark.parametrize("forward", ["default", "float32", "rules", "torch"])
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant", "custom_bwd"])
def test_compiled_autograd_has_the_forward_s_table(kind: str, forward: str) -> None:
    seen: list[torch.dtype] = []
    make, dtype = FORWARD[forward]

    def block(x: torch.Tensor) -> torch.Tensor:
        y = linear(x, x)
        seen.append(y.dtype)
        return y.float().square()

    torch._dynamo.reset()
    with make():
        loss = (
            Ours.apply(seen, leaf()) if kind == "custom_bwd" else checkpoint(block, leaf(), use_reentrant=KINDS[kind])
        )
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        loss.sum().backward()
    assert seen == [dtype, dtype]
