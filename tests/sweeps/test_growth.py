"""What a program pays doesn't grow with what it did before: work in bytecodes of mpamp, memory in bytes, no times."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import mpamp
from mpamp.functions import setuplink

from .interrupts import count_steps

BF16 = torch.bfloat16
MOST_KEPT = 600
"""More regions than are kept for those who ask for the same again."""
OPS = (
    "relu",
    "tanh",
    "exp",
    "sin",
    "cos",
    "erf",
    "sigmoid",
    "log",
    "sqrt",
    "elu",
    "celu",
    "selu",
    "mish",
    "abs",
    "gelu",
)


def rules(number: int) -> dict[str, str]:
    """Return rules of their own for each number under 32,768; a few of them name every op."""
    return {op: "fp32" for bit, op in enumerate(OPS) if number * 12_347 >> bit & 1}


@pytest.fixture(autouse=True)
def no_rules() -> Iterator[None]:
    yield
    mpamp.set_op_rules("cpu", None)
    mpamp.clear_cache()


def use_tables(numbers: range) -> None:
    """Be in a region with a table of its own for each number, and make a node of autograd there."""
    x = torch.ones(1, requires_grad=True)
    for number in numbers:
        with mpamp.autocast("cpu", BF16, ops=rules(number)):
            x * 2


def use_regions(count: int) -> None:
    for number in range(count):
        with mpamp.autocast("cpu", BF16, ops={"gelu": "fp32"} if number % 2 else None):
            pass


def grown(work: Callable[[], Any], history: Callable[[int], Any], sizes: tuple[int, int]) -> tuple[int, int]:
    """Return the least steps of ``work`` after each size of ``history``."""
    seen = []
    for size in sizes:
        history(size)
        work()
        seen.append(min(count_steps(work) for _ in range(3)))
    return seen[0], seen[1]


# -- Work after a history ------------------------------------------------------------------------------


def enter() -> None:
    with mpamp.autocast("cpu", BF16, ops={"gelu": "fp32"}):
        F.linear(torch.ones(2, 2), torch.ones(2, 2))


def recompute(is_reentrant: bool) -> Callable[[], None]:
    weight = torch.nn.Parameter(torch.ones(2, 2))

    def work() -> None:
        x = torch.ones(2, 2, requires_grad=True)
        with mpamp.autocast("cpu", BF16, ops={"gelu": "fp32"}):
            y = checkpoint(lambda x: F.gelu(F.linear(x, weight)), x, use_reentrant=is_reentrant)
        y.float().sum().backward()

    return work


class Doubled(torch.autograd.Function):
    @staticmethod
    @mpamp.custom_fwd
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    @mpamp.custom_bwd
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return F.linear(grad, torch.ones(2, 2)).to(grad.dtype)


def custom_function() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    with mpamp.autocast("cpu", BF16, ops={"gelu": "fp32"}):
        y = Doubled.apply(x)
    y.sum().backward()


def change_rules() -> None:
    mpamp.set_op_rules("cpu", {"gelu": "fp32"})
    enter()
    mpamp.set_op_rules("cpu", None)
    enter()


WORK = {
    "entering": enter,
    "checkpoint": recompute(False),
    "reentrant checkpoint": recompute(True),
    "custom function": custom_function,
    "change of rules": change_rules,
}


@pytest.mark.parametrize("name", WORK)
def test_work_does_not_grow_with_the_regions_before(name: str) -> None:
    few, many = grown(WORK[name], use_regions, (100, 2000))
    assert many <= 1.1 * few + 50, (few, many)


@pytest.mark.sweep
@pytest.mark.parametrize("name", WORK)
def test_work_does_not_grow_with_the_tables_before(name: str) -> None:
    few, many = grown(WORK[name], lambda n: use_tables(range(n)), (MOST_KEPT, 2 * MOST_KEPT))
    assert many <= 1.1 * few + 50, (few, many)


@pytest.mark.sweep
@pytest.mark.parametrize("name", WORK)
def test_work_does_not_grow_with_a_hundred_thousand_regions(name: str) -> None:
    few, many = grown(WORK[name], use_regions, (1000, 100_000))
    assert many <= 1.1 * few + 50, (few, many)


def test_changes_of_rules_cost_the_same_each() -> None:
    def change(count: int) -> None:
        for number in range(count):
            mpamp.set_op_rules("cpu", rules(number + 1))

    few, many = grown(change_rules, change, (10, 200))
    assert many <= 1.1 * few + 50, (few, many)


def test_leaving_costs_the_same_however_many_regions_are_open() -> None:
    def nest(depth: int) -> int:
        if depth == 0:
            return count_steps(enter)
        with mpamp.autocast("cpu", BF16, ops={"gelu": "fp32"} if depth % 2 else None):
            return nest(depth - 1)

    nest(5)
    few, many = nest(10), nest(200)
    assert many <= 1.1 * few + 50, (few, many)


# -- Work of n things ----------------------------------------------------------------------------------


def optimizers(count: int) -> Callable[[], None]:
    """``count`` optimizers, each with a weight that has a kept cast, step once."""
    weights = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(count)]
    optims = [torch.optim.SGD([w], lr=0.1) for w in weights]
    for weight in weights:
        weight.grad = torch.ones(2, 2)

    def work() -> None:
        with mpamp.autocast("cpu", BF16, persistent_cache=True):
            for weight in weights:
                F.linear(torch.ones(2, 2), weight)
        for optim in optims:
            optim.step()

    return work


def scaled_optimizers(count: int) -> Callable[[], None]:
    weights = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(count)]
    optims = [torch.optim.SGD([w], lr=0.1) for w in weights]
    scaler = mpamp.GradScaler("cpu", init_scale=2.0)

    def work() -> None:
        with mpamp.autocast("cpu", BF16):
            loss = torch.stack([F.linear(torch.ones(2, 2), w).sum() for w in weights]).sum()
        scaler.scale(loss).backward()
        for optim in optims:
            scaler.step(optim)
        scaler.update()
        for optim in optims:
            optim.zero_grad()

    return work


def one_optimizer(count: int) -> Callable[[], None]:
    weights = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(count)]
    optim = torch.optim.SGD(weights, lr=0.1)
    scaler = mpamp.GradScaler("cpu", init_scale=2.0)

    def work() -> None:
        with mpamp.autocast("cpu", BF16):
            loss = torch.stack([F.linear(torch.ones(2, 2), w).sum() for w in weights]).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optim)
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()

    return work


def containers(count: int) -> Callable[[], None]:
    """A container of ``count`` lists, each inside of the one before, at most 60 deep."""
    depth = min(count // 5, 60)
    values: list[Any] = []
    for _ in range(count // depth):
        nested: Any = torch.ones(2)
        for _ in range(depth):
            nested = [nested]
        values.append(nested)
    function = mpamp.float_function(lambda v: v)

    def work() -> None:
        with mpamp.autocast("cpu", BF16):
            function(values)

    return work


def function_classes(count: int) -> Callable[[], None]:
    def make() -> type:
        class Function(torch.autograd.Function):
            @staticmethod
            @mpamp.custom_fwd
            def forward(x: torch.Tensor) -> torch.Tensor:
                return x * 2

            @staticmethod
            def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
                pass

            @staticmethod
            @mpamp.custom_bwd
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                return grad * 2

        return Function

    x = torch.ones(2, requires_grad=True)

    def work() -> None:
        with mpamp.autocast("cpu", BF16):
            for kind in [make() for _ in range(count)]:
                kind.apply(x).sum().backward()

    return work


def scopes_at_once(count: int) -> Callable[[], None]:
    """``count`` regions with different tables are open at once, and a checkpoint is in each."""

    def nest(depth: int, x: torch.Tensor) -> torch.Tensor:
        if depth == 0:
            return x
        with mpamp.autocast("cpu", BF16, ops=rules(depth)):
            return nest(depth - 1, checkpoint(F.gelu, x, use_reentrant=False))

    return lambda: nest(count, torch.ones(2, 2, requires_grad=True)).float().sum().backward()


MANY = {f.__name__: f for f in (optimizers, scaled_optimizers, one_optimizer, containers, function_classes)}


@pytest.mark.parametrize("name", MANY)
def test_work_is_linear(name: str) -> None:
    if name == "function_classes" and setuplink.FUNCTION_APPLY is None:
        pytest.skip("this torch's apply has no frame that tells the Function: each is looked for among all, once")
    few, many = (steps_of(MANY[name](count)) for count in (10, 100))
    assert 0 < many <= 11 * few, (few, many, many / few)


def test_work_of_regions_in_each_other_is_linear() -> None:
    few, many = (steps_of(scopes_at_once(count)) for count in (4, 40))
    assert 0 < many <= 12 * few, (few, many, many / few)


def steps_of(work: Callable[[], None]) -> int:
    work()
    return min(count_steps(work) for _ in range(2))


# -- Memory --------------------------------------------------------------------------------------------


def bytes_used(work: Callable[[], Any]) -> int:
    """Return the bytes of Python objects that stay allocated after ``work``, over those before."""
    gc.collect()
    tracemalloc.start()
    try:
        work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def thread_with_region() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4), requires_grad=False)

    def work() -> None:
        with mpamp.autocast("cpu", BF16, persistent_cache=True):
            F.linear(torch.ones(4, 4), weight)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_memory_does_not_grow_with_regions() -> None:
    use_regions(200)
    assert bytes_used(lambda: use_regions(2000)) < 20_000


def test_memory_does_not_grow_with_threads() -> None:
    for _ in range(5):
        thread_with_region()
    assert bytes_used(lambda: [thread_with_region() for _ in range(100)]) < 40_000


@pytest.mark.parametrize("name", ["checkpoint", "reentrant checkpoint", "custom function", "change of rules"])
def test_memory_does_not_grow_with_work(name: str) -> None:
    for _ in range(20):
        WORK[name]()
    count = 40 if name == "change of rules" else 200  # a change installs kernels
    used = [bytes_used(lambda: [WORK[name]() for _ in range(count)]) for _ in range(2)]
    assert min(used) < 60_000  # under torch.autocast it's 25,000; what the process does for the first time may add


@pytest.mark.sweep
def test_memory_does_not_grow_with_changes_of_rules() -> None:
    def change(numbers: range) -> None:
        for number in numbers:
            mpamp.set_op_rules("cpu", rules(number))
            with mpamp.autocast("cpu", BF16, ops={"linear": "fp32"}):
                pass

    change(range(500))
    assert bytes_used(lambda: change(range(500, 5000))) < 500_000  # a table kept for each would be over ten times that


# -- The checks themselves -----------------------------------------------------------------------------


def test_steps_are_those_of_the_library() -> None:
    assert count_steps(lambda: sum(range(1000))) == 0
    assert count_steps(lambda: use_regions(20)) > 5 * count_steps(lambda: use_regions(2)) > 0


def test_kept_memory_is_found() -> None:
    kept: list[Any] = []
    assert bytes_used(lambda: kept.extend(str(n) * 10 for n in range(10_000))) > 500_000
