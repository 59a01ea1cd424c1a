"""The mark: which tables are in force, carried by torch's own autocast state."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

import mpamp
from mpamp import scope


def on_a_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def marks() -> tuple[int, int]:
    """Return the marks of two regions with tables of their own."""
    found = []
    for op in ("softmax", "relu"):
        with mpamp.autocast("cpu", ops={op: "fp32"}):
            found.append(scope.read_mark())
    return found[0], found[1]


def carriers() -> list[tuple[bool, torch.dtype]]:
    return [(torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in scope.CARRIERS]


def test_a_mark_is_read_as_it_was_written() -> None:
    def written(mark: int) -> int:
        scope.write_mark(scope.NO_MARK, mark)
        return scope.read_mark()

    first, second = marks()
    assert first != second
    for mark in (scope.NO_MARK, scope.DEFAULT_MARK, first, second):
        assert on_a_thread(lambda mark=mark: written(mark)) == mark


def test_taking_a_mark_away_leaves_the_carriers_as_they_were() -> None:
    mark = marks()[0]

    def states() -> tuple[Any, Any]:
        before = carriers()
        scope.write_mark(scope.NO_MARK, mark)
        assert carriers() != before
        scope.write_mark(mark, scope.NO_MARK)
        return before, carriers()

    before, after = on_a_thread(states)
    assert after == before


def test_a_thread_that_inherited_a_mark_may_enter_a_region_with_another() -> None:
    """Autograd's own threads get the mark with torch's state; nothing of ours has run there before."""
    first, second = marks()

    def nested() -> list[int]:
        assert scope.THREAD.state.carried == []
        scope.write_mark(first, second)
        inner = scope.read_mark()
        scope.write_mark(second, first)
        return [inner, scope.read_mark()]

    assert on_a_thread(nested) == [second, first]
