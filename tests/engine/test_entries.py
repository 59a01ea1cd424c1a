"""Entering and leaving: in any order, after any exception, all of a thread's state is what it was."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import mpamp
from mpamp.engine import entries
from mpamp.engine.marks import NO_MARK, changes_to
from mpamp.engine.resolving import mark_here
from mpamp.engine.scope import THREAD

BF16, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
DEVICES = ["cpu", "cuda", "xpu", "ipu", "maia", "mtia", "hpu", "xla", "mps"]
REGIONS: dict[str, Callable[[], Any]] = {
    "default": lambda: mpamp.autocast("cpu", BF16),
    "float16": lambda: mpamp.autocast("cpu", HALF),
    "rules": lambda: mpamp.autocast("cpu", BF16, ops={"gelu": "fp32"}),
    "other rules": lambda: mpamp.autocast("cpu", HALF, ops={"linear": "fp32"}),
    "disabled": lambda: mpamp.autocast("cpu", enabled=False),
}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    while THREAD.state.entries:  # or one failure would be that of every test after it
        entries.leave(THREAD.state.entries[-1][0])


def state() -> tuple[Any, ...]:
    devices = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in DEVICES]
    scopes = [scope for scope in THREAD.state.scopes[:-1] if scope is not None]
    return devices, torch.is_autocast_cache_enabled(), mark_here(), scopes, len(THREAD.state.entries)


@pytest.mark.parametrize("names", list(itertools.product(REGIONS, repeat=3)), ids=", ".join)
def test_regions_are_left_in_any_order(names: tuple[str, ...]) -> None:
    before = state()
    for order in itertools.permutations(range(3)):
        regions = [REGIONS[name]() for name in names]
        for region in regions:
            region.__enter__()
        for index in order:
            regions[index].__exit__(None, None, None)
        assert state() == before, order


def test_what_is_left_open_stays_on_whoever_is_left_before_it() -> None:
    first, second = REGIONS["default"](), REGIONS["rules"]()
    with first:
        want_mark = None
        second.__enter__()
        want_mark = mark_here()
    assert mark_here() is want_mark
    assert torch.is_autocast_enabled("cpu")
    assert len(THREAD.state.entries) == 1
    second.__exit__(None, None, None)
    assert mark_here() is NO_MARK


def test_leaving_what_was_not_entered_changes_nothing() -> None:
    before = state()
    with pytest.raises(mpamp.RegionError, match="had not entered it"):
        REGIONS["default"]().__exit__(None, None, None)
    assert state() == before
    with REGIONS["rules"](), pytest.raises(mpamp.RegionError):
        entries.leave(object())
    assert state() == before


class Boom(BaseException):
    """Not an Exception: as KeyboardInterrupt comes, anywhere."""


def interrupted(function: Callable[[], None], line: int) -> bool:
    """Call a function, with an exception at the n-th line that it runs of mpamp's; tell whether there was one."""
    seen = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal seen
        if "/mpamp/" not in frame.f_code.co_filename.replace("\\", "/"):
            return None
        if event == "line":
            seen += 1
            if seen == line:
                raise Boom
        return trace

    sys.settrace(trace)
    try:
        function()
    except Boom:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.python_engine
@pytest.mark.parametrize("outer", [None, "default", "rules", "disabled"])
@pytest.mark.parametrize("name", REGIONS)
def test_an_exception_at_any_line_of_entering_leaves_nothing(name: str, outer: str | None) -> None:
    def run() -> int:
        region, before, lines = REGIONS[name](), state(), 0
        with region:
            pass
        while interrupted(region.__enter__, lines + 1):
            assert state() == before, lines
            lines += 1
        region.__exit__(None, None, None)
        assert state() == before
        return lines

    if outer is None:
        assert run() > 3
    else:
        with REGIONS[outer]():
            assert run() > 3


@pytest.mark.python_engine
@pytest.mark.parametrize("name", REGIONS)
def test_an_exception_at_any_line_of_leaving_leaves_nothing_or_all(name: str) -> None:
    region, before, lines = REGIONS[name](), state(), 0
    while True:
        region.__enter__()
        inside = state()
        was_interrupted = interrupted(lambda: region.__exit__(None, None, None), lines + 1)
        assert state() in (before, inside), lines
        if state() == inside:
            region.__exit__(None, None, None)
        assert state() == before
        if not was_interrupted:
            break
        lines += 1
    assert lines > 3


@pytest.mark.parametrize("name", REGIONS)
def test_a_recursion_that_goes_too_deep_leaves_nothing(name: str) -> None:
    region, before = REGIONS[name](), state()
    with region:
        pass

    def walk() -> None:
        with region:
            walk()

    for extra in range(12):  # the last call may be any of those that entering makes
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(300 + extra)
        try:
            with pytest.raises(RecursionError):
                walk()
        finally:
            sys.setrecursionlimit(limit)
        assert state() == before, extra


def test_changes_are_made_and_undone_as_one() -> None:
    before, owner = state(), object()
    changes = [(torch.set_autocast_dtype, "cpu", HALF), *changes_to(NO_MARK)]
    entries.enter(owner, changes, False)
    assert torch.get_autocast_dtype("cpu") is HALF
    assert not torch.is_autocast_cache_enabled()
    entries.leave(owner)
    assert state() == before

    def fails(part: str, value: Any) -> None:
        if value is FULL:
            raise ValueError("part")

    with pytest.raises(ValueError, match="part"):
        entries.enter(owner, [(torch.set_autocast_dtype, "cpu", HALF), (THREAD.state.put, 0, None), (fails, 0, FULL)])
    assert state() == before
