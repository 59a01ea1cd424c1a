"""torch's private names stand in one file, each once, and every torch that is supported has them."""

from __future__ import annotations

import ast
import functools
import importlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from mpamp import torch_internals

MPAMP = Path(__file__).parents[1] / "mpamp"
INTERNALS = Path(torch_internals.__file__)
OTHERS = [path for path in sorted(MPAMP.rglob("*.py")) if path != INTERNALS]
HERE = Path(torch.__file__).parents[1]
RELEASE = Version(Version(torch.__version__).base_version)
ELSEWHERE = [Path(place) for place in os.environ.get("MPAMP_TEST_TORCHES", "").split(os.pathsep) if place]
"""Where other torches are, each as its wheel unpacked: they are read, not run."""
_PATH = re.compile(r"torch(\.\w+)+")


# -- What a file names ---------------------------------------------------------------------------------


def imported(tree: ast.AST, package: str) -> dict[str, str]:
    """Return what a file's own names for a package and its parts mean."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            whole = [a for a in node.names if a.name.split(".")[0] == package]
            found.update({a.asname or package: a.name if a.asname else package for a in whole})
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == package:
            found.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and dotted(node.value, found):
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            found.setdefault(name, dotted(node.value, found) or "")
    return found


def dotted(node: ast.AST, meanings: dict[str, str]) -> str | None:
    """Return the full name that an expression is, or None."""
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, meanings)
        return owner and f"{owner}.{node.attr}"
    return meanings.get(node.id) if isinstance(node, ast.Name) else None


def is_private(name: str) -> bool:
    """Tell whether a name of torch's is private; ops are not, which tables list."""
    parts = name.split(".")
    is_hidden = any(part.startswith("_") and not part.startswith("__") for part in parts)
    return parts[:2] != ["torch", "ops"] and (is_hidden or parts[:3] == ["torch", "fx", "experimental"])


def named(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield torch's names in a file, the longest, and their lines."""
    meanings, inner = imported(tree, "torch"), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((a.name, node.lineno) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{a.name}", node.lineno) for a in node.names if not node.level)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _PATH.fullmatch(node.value):
            yield node.value, node.lineno
        elif isinstance(node, ast.Attribute):
            inner.add(node.value)
            name = dotted(node, meanings)
            if name and node not in inner:
                yield name, node.lineno


def private_names(tree: ast.AST) -> list[tuple[str, int]]:
    return [(name, line) for name, line in named(tree) if name.split(".")[0] == "torch" and is_private(name)]


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._C import DispatchKey",
        "from torch import _C",
        "from torch.utils import _pytree as trees",
        "from torch.fx.experimental.proxy_tensor import make_fx",
        "import torch\ndef f():\n    return torch._C.DispatchKey.CPU",
        "import torch as t\nt._foreach_mul_([], 1)",
        "import torch\nTensor = torch.Tensor\nTensor._make_subclass",
        "from torch import amp\namp.autocast_mode._enter_autocast('cpu')",
        "import sys\nsys.modules['torch._dynamo.trace_rules']",
    ],
)
def test_a_private_name_is_found_however_it_is_written(source: str) -> None:
    assert private_names(ast.parse(source))


@pytest.mark.parametrize(
    "source", ["import torch\ntorch.ops.aten._to_copy", "import torch\ntorch.__version__", "'see torch._C for it'"]
)
def test_ops_and_public_names_and_sentences_are_not(source: str) -> None:
    assert not private_names(ast.parse(source))


def lines_of(find: Callable[[ast.AST], list[Any]]) -> dict[str, list[Any]]:
    """Return what is found in the other files, by their names."""
    found = {str(path.relative_to(MPAMP)): find(ast.parse(path.read_text())) for path in OTHERS}
    return {name: lines for name, lines in found.items() if lines}


def test_no_other_file_has_a_private_name() -> None:
    assert lines_of(private_names) == {}


# -- What differs by version ---------------------------------------------------------------------------


def asked(tree: ast.AST) -> list[int]:
    """Return the lines at which a file asks torch whether it has a name, or is of a version that is written there."""
    meanings, found = imported(tree, "torch"), []
    for node in ast.walk(tree):
        parts = list(ast.walk(node))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("hasattr", "getattr"):
            names = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant) and not a.value.startswith("__")]
            found += [node.lineno] * bool(names and dotted(node.args[0], meanings))
        elif isinstance(node, ast.Compare) and any(dotted(part, meanings) == "torch.__version__" for part in parts):
            written = [part for part in parts if isinstance(part, ast.Constant) and re.match(r"\d", str(part.value))]
            found += [node.lineno] * any(isinstance(part.value, str) for part in written)
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nhasattr(torch.library, 'get_kernel')",
        "from torch.utils import checkpoint\ngetattr(checkpoint, 'checkpoint', None)",
        "import torch\ntorch.__version__ < '2.9'",
        "import torch\ntuple(torch.__version__.split('.')) < ('2', '9')",
    ],
)
def test_a_question_of_torchs_version_is_found(source: str) -> None:
    assert asked(ast.parse(source))


def test_no_other_file_asks_what_this_torch_has() -> None:
    assert lines_of(asked) == {}


# -- What the one file names ---------------------------------------------------------------------------


def _tree() -> ast.Module:
    return ast.parse(INTERNALS.read_text())


def _when() -> tuple[dict[str, Version], set[str]]:
    """Return the names that torch has from a release on, and those that some builds have."""
    meanings, since, built = imported(_tree(), "torch"), {}, set()
    for node in ast.walk(_tree()):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            constants = [a.value for a in node.args if isinstance(a, ast.Constant)]
            if node.func.id == "_since":
                since[f"{dotted(node.args[1], meanings)}.{constants[1]}"] = Version(str(constants[0]))
            elif node.func.id == "_where_built":
                built.add(f"{dotted(node.args[0], meanings)}.{constants[0]}")
    return since, built


def _unconditional() -> list[str]:
    """Return the private names that every torch has, once for each time that they are written, without their owners."""
    names = [name for name, _ in private_names(_tree())]
    return [name for name in names if not any(other.startswith(f"{name}.") for other in names)]


SINCE, BUILT = _when()
OWNERS = {*torch_internals.ATTRIBUTES, *(name.rpartition(".")[0] for name in (*SINCE, *BUILT))}
ALWAYS = sorted({*_unconditional()} - OWNERS)


def test_each_is_named_once() -> None:
    assert [name for name, count in Counter(_unconditional()).items() if count > 1] == []


def _bound() -> set[str]:
    """Return the names that the file defines."""
    found = set()
    for node in _tree().body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            found.add(ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target))
    return found


def test_no_value_that_torch_may_change_is_kept() -> None:
    meanings, kept = imported(_tree(), "torch"), set()
    for node in _tree().body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and dotted(node.value, meanings):
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            kept |= {name} if isinstance(getattr(torch_internals, name), int | float | str | tuple | None) else set()
    assert kept == {"GLIBCXX_USE_CXX11_ABI"}  # of the build


def _imports_of(path: Path) -> list[tuple[str, str]]:
    """Return what a file imports from the one, and what it calls that."""
    nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
    return [(a.name, a.asname or a.name) for n in nodes if n.module == "torch_internals" for a in n.names]


def test_each_is_used() -> None:
    inside = {node.id for node in ast.walk(_tree()) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    assert _bound() - inside - {name for path in OTHERS for name, _ in _imports_of(path)} == {"ATTRIBUTES"}


# -- Attributes ----------------------------------------------------------------------------------------

ATTRIBUTES = {name for names in torch_internals.ATTRIBUTES.values() for name in names}
OF_OTHERS = {
    "_at_fork_reinit",
    "_current_frames",
    "_fields",
    "_getframe",
    "_initializing",
    "_make",
    "_after_closure",
    "_is_accelerate_prepared",
    "_original_forward",
}
"""Python's and the training frameworks'."""


def attributes(tree: ast.AST) -> set[str]:
    """Return the private attributes that a file uses of anything but torch's ops and what it knows the name of."""
    meanings, found = imported(tree, "torch"), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and dotted(node, meanings) is None:
            found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("hasattr", "getattr"):
            found |= {a.value for a in node.args[1:2] if isinstance(a, ast.Constant)}
    return {name for name in found if name.startswith("_") and not name.startswith(("__", "_mpamp", "_amp", "_repr"))}


def own(tree: ast.AST) -> set[str]:
    """Return what a file defines: functions, classes, variables and attributes of its objects."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def test_every_private_attribute_of_torchs_objects_is_listed() -> None:
    defined: set[str] = set().union(*(own(ast.parse(path.read_text())) for path in OTHERS))
    listed = ATTRIBUTES | OF_OTHERS | defined
    assert lines_of(lambda tree: sorted(attributes(tree) - listed)) == {}


def test_an_attribute_is_found() -> None:
    assert attributes(ast.parse("def f(t):\n    return t._one, getattr(t, '_two', None)")) == {"_one", "_two"}


def test_every_listed_attribute_is_used() -> None:
    used = {word for path in OTHERS for word in re.findall(r"\b_\w+", path.read_text())}
    assert ATTRIBUTES - used == set()


# -- Asking torch --------------------------------------------------------------------------------------


@functools.cache
def found(name: str) -> Any:
    """Return what a full name stands for in the torch that is installed; AttributeError where it hasn't got it."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, parts[count:], owner)
    raise ModuleNotFoundError(name)


def _has(name: str) -> bool:
    try:
        found(name)
    except AttributeError:
        return False
    return True


@pytest.mark.parametrize("name", ALWAYS)
def test_this_torch_has_it(name: str) -> None:
    assert _has(name)


def test_this_torch_is_not_said_to_have_what_it_has_not() -> None:
    assert not _has("torch._C._dispatch_no_such_thing")


@pytest.mark.parametrize("name", SINCE)
def test_this_torch_has_it_from_the_version_on_that_is_said(name: str) -> None:
    assert _has(name) == (SINCE[name] <= RELEASE)


PLACES = [v for v in vars(torch_internals).values() if isinstance(v, tuple) and not isinstance(v[0], str)]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: str(place[1]))
def test_this_torch_has_what_is_replaced(place: torch_internals.Place) -> None:
    assert hasattr(*place)


def _members() -> set[str]:
    """Return what the other files use of what they import from the one: the keys of an enumeration, methods."""
    uses = set()
    for path in OTHERS:
        meanings = {mine: name for name, mine in _imports_of(path)}
        uses |= {dotted(n, meanings) for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
    return {name for name in uses if name}


@pytest.mark.parametrize("name", sorted(_members()))
def test_this_torch_has_its_member(name: str) -> None:
    first, *rest = name.split(".")
    functools.reduce(getattr, rest, getattr(torch_internals, first))


def test_the_heavy_parts_are_found_by_the_functions_that_import_them() -> None:
    import torch._dynamo.eval_frame as eval_frame

    assert any(hasattr(eval_frame, name) for name in torch_internals.SET_EVAL_FRAME)
    tables, sourceless = torch_internals.type_handlers()
    assert all(isinstance(table, dict) for table in (*tables, sourceless))
    variable = torch_internals.context_variable()
    assert hasattr(variable, torch_internals.attribute_method(variable))
    assert torch_internals.constant_variable(3).as_python_constant() == 3
    assert isinstance(torch_internals.restart_analysis("again"), Exception)
    assert torch_internals.equals_match().__name__ == "EQUALS_MATCH"
    assert {"enter", "exit"} <= set(dir(torch_internals.autocast_variable()))
    assert isinstance(torch_internals.inductor_config().freezing, bool)
    assert torch.empty in torch_internals.device_constructors()
    assert isinstance(torch_internals.device_context()("cpu"), torch.overrides.TorchFunctionMode)


def is_from(release: str) -> bool:
    return Version(release) <= RELEASE


def test_what_differs_from_some_version_on() -> None:
    handles = torch_internals.attribute_method(torch_internals.context_variable())
    assert (handles == "tp_getattro_impl") == is_from("2.14")
    assert torch_internals.CHECKPOINT_GENERATOR[1].endswith("_impl") == is_from("2.14")
    assert (torch_internals.FUNCTION_APPLY is None) == is_from("2.14")
    assert (torch_internals.FORWARD_SYNC_BUFFERS == "forward_sync_buffers") == is_from("2.13")


# -- Reading torch's stubs and sources, of any version -------------------------------------------------


UNWRITTEN = {
    "torch.Tensor._make_subclass",
    "torch._C._set_tracing_state",
    "torch._dynamo.variables.ConstantVariable.create",
    "torch._C._fix_weakref",
    "torch._C._saved_other",
    "torch._C._use_count",
    "torch._C._wrapped_number",
}
"""What is C++'s own and in no stub, or is a class's that the module has from another."""


def _text(root: Path, module: list[str]) -> str | None:
    """Return what torch's wheel says of a module, in its stub and its source; None where there is neither."""
    path = root.joinpath(*module)
    places = [path / "__init__.pyi", path.with_suffix(".pyi"), path / "__init__.py", path.with_suffix(".py")]
    return "\n".join(place.read_text() for place in places if place.exists()) or None


def is_written(root: Path, name: str) -> bool:
    """Tell whether the text of the module that has a name says that name; of ``torch``, its stub of what is in C++."""
    parts = name.split(".")
    if len(parts) == 2 and _text(root, parts) is None:
        parts = ["torch", "_C", "_VariableFunctions", parts[1]]
    for count in range(len(parts), 0, -1):
        text = _text(root, parts[:count])
        if text is not None:
            return all(re.search(rf"\b{re.escape(part)}\b", text) for part in parts[count:])
    return False


def _release(root: Path) -> Version:
    said = re.search(r"__version__ = '([\d.]+)", (root / "torch" / "version.py").read_text())
    assert said is not None
    return Version(said[1])


@pytest.mark.parametrize("root", [HERE, *ELSEWHERE], ids=lambda root: str(_release(root)))
def test_the_text_of_a_torch_has_them_from_the_version_on_that_is_said(root: Path) -> None:
    attributes = {f"{module}.{name}" for module, names in torch_internals.ATTRIBUTES.items() for name in names}
    since = {name for name, release in SINCE.items() if _release(root) >= release}
    there = {*ALWAYS, *BUILT, *since, *attributes} - UNWRITTEN
    assert {name for name in {*there, *SINCE} if is_written(root, name) != (name in there)} == set()


def test_a_name_that_no_torch_has_is_not_written() -> None:
    assert not is_written(HERE, "torch._C._dispatch_no_such_thing")
