"""An exception at any place inside of entering, leaving or carrying a region leaves none of its state."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import mpamp

from .interrupts import Interrupt, count_places, picked
from .region_names import NAMES, call_on_thread
from .region_runs import autocast_state, plain_dtypes
from .test_exits import BF16, FP32, HALF, PLAIN, RULES

NEW = itertools.count()
UNCOMMON = ("relu", "tanh", "exp", "sin", "cos", "erf", "sigmoid", "log", "sqrt", "elu", "celu", "selu", "mish", "abs")


def new_rules() -> dict[str, str]:
    """Return rules that no region has had yet."""
    number = next(NEW)
    return {op: "fp32" for bit, op in enumerate(UNCOMMON) if number >> bit & 1} | {"linear": "fp32"}


def _inside(*contexts: Any) -> torch.dtype:
    with contexts[0]:
        return _inside(*contexts[1:]) if contexts[1:] else F.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype


def _decorated() -> torch.dtype:
    @mpamp.autocast("cpu", BF16, ops={"linear": "lower_precision_fp"})
    def function() -> torch.dtype:
        return _inside(mpamp.autocast("cpu", HALF))

    return function()


def _generator() -> None:
    @mpamp.autocast("cpu", BF16)
    def numbers() -> Iterator[int]:
        yield from range(3)

    with closing(numbers()) as running:
        next(running)
        next(running)


def _coroutine() -> None:
    @mpamp.autocast("cpu", BF16)
    async def wait() -> None:
        await asyncio.sleep(0)

    asyncio.run(wait())


def _backward(run: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.ones(2, 2, requires_grad=True)
    with mpamp.autocast("cpu", BF16, ops={"gelu": "fp32"}):
        y = run(x)
    y.float().sum().backward()


def _block(x: torch.Tensor) -> torch.Tensor:
    with mpamp.autocast("cpu", HALF):
        return F.gelu(F.linear(x.float(), WEIGHT))


def _rules() -> None:
    try:
        mpamp.set_op_rules("cpu", RULES | {"gelu": "fp32"})
        _inside(mpamp.autocast("cpu", BF16))
    finally:
        mpamp.set_op_rules("cpu", RULES)


WEIGHT = torch.nn.Parameter(torch.ones(2, 2))
PROGRAMS: dict[str, Callable[[], Any]] = {
    "region": lambda: _inside(mpamp.autocast("cpu", BF16)),
    "another dtype": lambda: _inside(mpamp.autocast("cpu", HALF, cache_enabled=False)),
    "float32": lambda: _inside(mpamp.autocast("cpu", FP32)),
    "disabled": lambda: _inside(mpamp.autocast("cpu", enabled=False)),
    "absent": lambda: _inside(mpamp.autocast("xpu")),
    "rules": lambda: _inside(mpamp.autocast("cpu", HALF, ops={"gelu": "fp32"})),
    "new rules": lambda: _inside(mpamp.autocast("cpu", HALF, ops=new_rules())),
    "nested": lambda: _inside(
        mpamp.autocast("cpu", BF16, ops={"gelu": "fp32"}), mpamp.autocast("cpu", HALF, ops={"silu": "fp32"})
    ),
    "nested disabled": lambda: _inside(mpamp.autocast("cpu", HALF), mpamp.autocast("cpu", enabled=False)),
    "around torch's": lambda: _inside(mpamp.autocast("cpu", HALF), torch.autocast("cpu", BF16)),
    "inside torch's": lambda: _inside(torch.autocast("cpu", BF16), mpamp.autocast("cpu", HALF)),
    "decorator": _decorated,
    "generator": _generator,
    "coroutine": _coroutine,
    "inherit_regions": lambda: _inside(mpamp.autocast("cpu", HALF)) and mpamp.inherit_regions(_decorated)(),
    "custom_fwd": lambda: _backward(lambda x: NAMES["FUNCTIONS"]["mpamp"].apply(_block, x)),
    "custom_fwd float32": lambda: _backward(lambda x: NAMES["FUNCTIONS"]["mpamp float32"].apply(_block, x)),
    "torch's custom_fwd": lambda: _backward(lambda x: NAMES["FUNCTIONS"]["torch.amp"].apply(_block, x)),
    "checkpoint": lambda: _backward(lambda x: checkpoint(_block, x, use_reentrant=False)),
    "reentrant checkpoint": lambda: _backward(lambda x: checkpoint(_block, x, use_reentrant=True)),
    "set_op_rules": _rules,
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:device 'xpu' is not available"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def rules() -> Iterator[None]:
    mpamp.set_op_rules("cpu", RULES)
    yield
    mpamp.set_op_rules("cpu", None)


def left_by(program: Callable[[], Any], error: type[BaseException], at: int) -> tuple[str, str]:
    """Return where the exception struck, and what state is left, of torch's and of later regions."""

    def work() -> tuple[str, str]:
        before = autocast_state()
        interrupt = Interrupt(error, at)
        try:
            with interrupt:
                program()
        except error:
            pass
        if interrupt.is_at_start_of_exit:
            return interrupt.where, ""
        after, plain = autocast_state(), plain_dtypes()
        left = [f"{k}: {before[k]} -> {after[k]}" for k in before if before[k] != after[k]]
        left += [] if plain == PLAIN else [f"torch.autocast gives {plain}"]
        again = (
            _inside(mpamp.autocast("cpu", BF16, ops={"linear": "lower_precision_fp"})),
            _inside(mpamp.autocast("cpu", BF16)),
        )
        left += [] if again == (BF16, FP32) else [f"later regions give {again}"]
        return interrupt.where, "; ".join(left)

    try:
        return call_on_thread(work, 20)  # type: ignore[no-any-return]
    except TimeoutError:
        raise
    except Exception as problem:
        return f"place {at}", f"a later region raises {problem!r}"


def check(name: str, error: type[BaseException], most: int, *, is_first: bool = False) -> None:
    """Strike up to ``most`` places of a program that has run before, or is the first since rules changed."""
    program = PROGRAMS[name]

    def get_ready() -> None:
        if is_first:
            mpamp.set_op_rules("cpu", RULES)
        else:
            call_on_thread(program)

    get_ready()
    count = call_on_thread(lambda: count_places(program))
    numbers = picked(count, most)
    found = {}
    for at in numbers:
        get_ready()
        where, left = left_by(program, error, at)  # a lock that stays locked is a TimeoutError
        if left:
            found[where] = left
    listed = "\n".join(f"{where}: {left}" for where, left in list(found.items())[:15])
    assert not found, f"an exception leaves state at {len(found)} of {len(numbers)} places:\n{listed}"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RecursionError])
@pytest.mark.parametrize("name", ["region", "disabled", "absent", "rules", "nested", "around torch's"])
def test_an_exception_at_any_place_leaves_nothing(name: str, error: type[BaseException]) -> None:
    check(name, error, 150)


@pytest.mark.sweep
@pytest.mark.parametrize("error", [KeyboardInterrupt, RecursionError])
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_exception_at_any_place_of_any_program_leaves_nothing(name: str, error: type[BaseException]) -> None:
    check(name, error, 400)


@pytest.mark.sweep
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_exception_at_a_place_of_a_program_s_first_run_leaves_nothing(name: str) -> None:
    check(name, KeyboardInterrupt, 400, is_first=True)


def _deep(frames: int, program: Callable[[], Any]) -> None:
    if frames:
        _deep(frames - 1, program)
    else:
        program()


@pytest.mark.parametrize("name", [n for n in PROGRAMS if n not in ("coroutine", "new rules", "set_op_rules")])
def test_too_deep_a_recursion_leaves_nothing(name: str) -> None:
    """Whatever number of frames is left, entering fails, or what it did is undone."""
    program = PROGRAMS[name]

    def work(frames: int) -> str:
        before = autocast_state()
        with suppress(RecursionError):
            _deep(frames, program)
        left = [f"{k}: {before[k]} -> {v}" for k, v in autocast_state().items() if before[k] != v]
        return "; ".join(left + ([] if plain_dtypes() == PLAIN else ["plain torch.autocast isn't torch's"]))

    call_on_thread(program)
    limit = sys.getrecursionlimit()
    found = {f: left for f in range(limit - 50, limit) if (left := call_on_thread(lambda f=f: work(f)))}  # type: ignore[misc]
    assert found == {}


# -- The check itself ----------------------------------------------------------------------------------


def test_every_place_is_struck_once() -> None:
    def program() -> None:
        _inside(mpamp.autocast("cpu", BF16))

    def strike(at: int) -> str:
        with pytest.raises(KeyboardInterrupt, match="at "), Interrupt(KeyboardInterrupt, at) as interrupt:
            program()
        return interrupt.where

    program()
    count = call_on_thread(lambda: count_places(program))
    struck = {call_on_thread(lambda at=at: strike(at)) for at in range(1, count + 1)}  # type: ignore[misc]
    assert any("__enter__" in where for where in struck)
    assert any("__exit__" in where for where in struck)
    assert picked(10, 20) == list(range(1, 11))
    assert {1, 30, 1000} <= set(picked(1000, 90))
