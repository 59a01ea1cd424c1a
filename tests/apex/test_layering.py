"""The drop-in's files import each other in one direction only, imports for types and inside of functions included."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

import mpamp.apex


def imports(path):
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
    return found


def graph():
    return {path.stem: imports(path) for path in Path(mpamp.apex.__file__).parent.glob("*.py")}


def test_there_is_no_circle():
    order = list(graphlib.TopologicalSorter(graph()).static_order())
    assert order.index("errors") < order.index("state") < order.index("handle") < order.index("initialize")


def test_a_circle_would_be_found():
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter({**graph(), "errors": {"initialize"}}).prepare()
