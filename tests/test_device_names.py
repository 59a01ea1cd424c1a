"""Nothing outside of ``mpamp/backends/<device>/`` branches on a device's name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMES = {"cpu", "cuda", "xpu", "mps", "hip", "hpu", "npu", "mtia", "privateuseone"}
PREDICATES = {f"is_{name}" for name in NAMES}


def branches_on_names(source: str) -> list[int]:
    """Return the lines of a module that decide anything by the name of a device.

    A decision is a comparison, a membership test, ``startswith`` or ``endswith``, a case of ``match``, and
    ``tensor.is_<device>`` in a condition; comparisons count anywhere, as their result may be kept.
    """
    return sorted({line for node in ast.walk(ast.parse(source)) for line in _lines(node)})


def _lines(node: ast.AST) -> Iterator[int]:
    if isinstance(node, ast.Compare):
        asked: list[ast.AST] = [node.left, *node.comparators]
    elif isinstance(node, ast.MatchValue):
        asked = [node.value]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TESTS:
        asked = list(node.args)
    else:
        asked = []
    yield from (found.lineno for part in asked for found in _constants(part) if _is_name(found.value))
    for condition in _conditions(node):
        for part in ast.walk(condition):
            if isinstance(part, ast.Attribute) and part.attr in PREDICATES:
                yield part.lineno


_TESTS = {"startswith", "endswith", "__eq__", "__contains__"}


def _conditions(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
        return [node.test]
    return list(node.ifs) if isinstance(node, ast.comprehension) else []


def _constants(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield the constants that an operand is made of, not those of an index or an argument in it."""
    if isinstance(node, ast.Constant):
        yield node
    elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        for part in node.elts:
            yield from _constants(part)
    elif isinstance(node, ast.Dict):
        for key in node.keys:
            if key is not None:
                yield from _constants(key)
    elif isinstance(node, ast.Call):
        for part in node.args:  # torch.device("cuda"), frozenset({"cpu"})
            yield from _constants(part)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.partition(":")[0] in NAMES


def _is_a_devices_own(path: Path) -> bool:
    parts = path.relative_to(ROOT / "mpamp").parts
    return parts[0] == "backends" and len(parts) > 2


MODULES = sorted(p for p in (ROOT / "mpamp").rglob("*.py") if not _is_a_devices_own(p))


def test_there_are_modules_to_look_at() -> None:
    assert len(MODULES) > 40
    assert ROOT / "mpamp" / "plugins" / "backend.py" in MODULES
    assert ROOT / "mpamp" / "backends" / "cpu" / "__init__.py" not in MODULES


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_condition_names_a_device(path: Path) -> None:
    found = branches_on_names(path.read_text(encoding="utf-8"))
    assert not found, f"{path}: lines {found} decide by a device's name; ask its backend"


@pytest.mark.parametrize(
    "source",
    [
        "if device.type == 'cuda': pass",
        "while 'xpu' != name: pass",
        "x = 1 if name in ('cpu', 'mps') else 2",
        "is_cuda = device_type == 'cuda'",
        "if device == torch.device('cuda:0'): pass",
        "if name in frozenset({'xpu'}): pass",
        "match name:\n    case 'cuda': pass",
        "match name:\n    case 'a' | 'xpu': pass",
        "if name.startswith('cuda'): pass",
        "if x.is_cuda and y: pass",
        "[t for t in tensors if t.is_xpu]",
        "assert name not in {'cpu': 1}",
        "x = lambda t: t.device.type == 'cuda'",
    ],
)
def test_a_branch_on_a_name_is_found(source: str) -> None:
    assert branches_on_names(source)


@pytest.mark.parametrize(
    "source",
    [
        "device = 'cpu'",
        "autocast('cuda')",
        "if is_available(): x = torch.device('cpu')",
        "tensor.cpu() if tensor.device == other else tensor",
        "'''An example: device == 'cuda' '''",
        "if key == 'cupy': pass",
    ],
)
def test_a_name_that_decides_nothing_is_left(source: str) -> None:
    assert branches_on_names(source) == []
