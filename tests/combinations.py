"""Which tests run: by default those that aren't slow, with each value of each parameter in at least one of them.

A test with several parameters is one behaviour, asked over a cross product of thousands of cases.
MPAMP_TEST_COMBINATIONS says which of these run: ``each`` (the default), ``all``, or ``K/N``: the Kth of N parts of
what ``each`` leaves out, slow tests too.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from typing import Any

import pytest

VARIABLE = "MPAMP_TEST_COMBINATIONS"


def part() -> str | tuple[int, int]:
    """Return what MPAMP_TEST_COMBINATIONS asks for: "each", "all", or the part's number and how many there are.

    Raises:
        pytest.UsageError: It asks for something else.
    """
    text = os.environ.get(VARIABLE) or "each"
    if text in ("each", "all"):
        return text
    number, _, count = text.partition("/")
    if number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count):
        return int(number), int(count)
    raise pytest.UsageError(f"{VARIABLE} is each, all or K/N with 1 <= K <= N; got {text!r}")


def _values(item: pytest.Item) -> frozenset[tuple[str, object]]:
    """Return each parameter's name with its value."""
    callspec: Any = getattr(item, "callspec", None)
    params = {} if callspec is None else callspec.params
    return frozenset((name, _known_by(value, callspec.indices[name])) for name, value in params.items())


def _known_by(value: object, index: int) -> object:
    """Return a value that can be hashed: itself, else its place in the list of values."""
    try:
        hash(value)
    except TypeError:
        return index
    return value


def _number(item: pytest.Item) -> int:
    """Return a number that says which part has the test; slow ones of a file, which share fixtures, have the same."""
    return zlib.crc32((item.nodeid.partition("::")[0] if _is_slow(item) else item.nodeid).encode())


def _is_slow(item: pytest.Item) -> bool:
    return any(mark.name == "slow" for mark in item.iter_markers())


def covering(items: Iterable[pytest.Item]) -> set[str]:
    """Return the ids of few tests such that each value of each parameter is in one of them.

    Those with the most values that no other has had come first, so that a product of n and m values gives about as
    many as the larger of both.
    """
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    found: set[str] = set()
    for group in groups.values():
        found.update(_covering(sorted(group, key=_number)))
    return found


def _covering(group: list[pytest.Item]) -> list[str]:
    if len(group) == 1:
        return [group[0].nodeid]
    seen: set[tuple[str, object]] = set()
    found = []
    for wanted in range(max(len(_values(item)) for item in group), 0, -1):
        for item in group:
            if len(_values(item) - seen) >= wanted:
                seen |= _values(item)
                found.append(item.nodeid)
    return found


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests that MPAMP_TEST_COMBINATIONS asks for; a test named by its id stays."""
    wanted = part()
    if wanted == "all" or any("::" in arg for arg in config.args):
        return
    runnable = [item for item in items if not any(mark.name == "skip" for mark in item.iter_markers())]
    first = covering([item for item in runnable if not _is_slow(item)])
    if isinstance(wanted, tuple):
        number, count = wanted
        kept = [i for i in runnable if i.nodeid not in first and _number(i) % count == number - 1]
    else:
        kept = [i for i in items if i.nodeid in first]
    chosen = {item.nodeid for item in kept}
    dropped = [item for item in items if item.nodeid not in chosen]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
