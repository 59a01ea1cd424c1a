"""Which combinations run: each value of each parameter once by default, the others in parts, none of them lost."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from tests import combinations
from tests.combinations import covering


def items(test: str = "test_x", **values: list[Any]) -> list[Any]:
    """Return what the collected tests of a cross product look like."""
    found = []
    for picked in itertools.product(*(enumerate(v) for v in values.values())):
        params = {name: value for name, (_, value) in zip(values, picked, strict=True)}
        indices = {name: index for name, (index, _) in zip(values, picked, strict=True)}
        text = "-".join(map(str, params.values()))
        found.append(
            SimpleNamespace(
                nodeid=f"tests/test_x.py::{test}[{text}]" if values else f"tests/test_x.py::{test}",
                callspec=SimpleNamespace(params=params, indices=indices),
                iter_markers=lambda: iter(()),
            )
        )
    return found


def config(*args: str) -> Any:
    return SimpleNamespace(args=args, hook=SimpleNamespace(pytest_deselected=lambda items: None))


def test_each_value_of_a_product_is_in_few_tests() -> None:
    product = items(op=["mm", "add", "cat"], dtype=["half", "bfloat16"], rules=[{}, {"mm": "fp32"}, {"mm": "promote"}])
    found = [i for i in product if i.nodeid in covering(product)]
    for name, count in {"op": 3, "dtype": 2}.items():
        assert len({i.callspec.params[name] for i in found}) == count
    assert {i.callspec.indices["rules"] for i in found} == {0, 1, 2}, "dicts are known by their place"
    assert 3 <= len(found) < 9 < len(product)


def test_a_test_of_one_parameter_or_none_runs_whole() -> None:
    alone = [*items(op=list("abcdefg")), *items("test_y")]
    assert covering(alone) == {i.nodeid for i in alone}


def test_the_parts_are_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    product = items(op=list("abcdefgh"), dtype=list("xyz"), place=list("pq"))
    runs = []
    for wanted in ("each", "1/3", "2/3", "3/3"):
        monkeypatch.setenv(combinations.VARIABLE, wanted)
        left = list(product)
        combinations.choose(config("tests"), left)
        runs.append({i.nodeid for i in left})
    assert all(runs)
    assert sum(map(len, runs)) == len(set().union(*runs)) == len(product)


@pytest.mark.parametrize("args", [["tests/test_x.py::test_x[a-x]"], []])
def test_a_test_that_is_named_stays_and_all_are_all(args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    product = items(op=list("ab"), dtype=list("xy"))
    monkeypatch.setenv(combinations.VARIABLE, "each" if args else "all")
    left = list(product)
    combinations.choose(config(*args), left)
    assert left == product


@pytest.mark.parametrize("text", ["0/3", "4/3", "half", "1/", "1/x"])
def test_what_is_no_part_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(combinations.VARIABLE, text)
    with pytest.raises(pytest.UsageError, match="MPAMP_TEST_COMBINATIONS is each, all or K/N"):
        combinations.part()


def test_slow_tests_are_in_the_parts_those_of_a_file_together(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, quick = items("test_slow", op=list("ab"), dtype=list("xy")), items("test_quick")
    for item in slow:
        item.iter_markers = lambda: iter([SimpleNamespace(name="slow")])
    runs = []
    for wanted in ("each", "1/3", "2/3", "3/3"):
        monkeypatch.setenv(combinations.VARIABLE, wanted)
        left = [*slow, *quick]
        combinations.choose(config("tests"), left)
        runs.append(left)
    assert runs[0] == quick
    assert sorted(map(len, runs[1:])) == [0, 0, len(slow)]
