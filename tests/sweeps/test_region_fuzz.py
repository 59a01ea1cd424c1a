"""Random trees of regions, checkpoints, Functions, threads and compiled blocks give what casts by hand give.

A tree is known by its number: ``print(program(valid(17)))`` prints one. A failing test prints its trees as programs,
shrunk as far as they go on failing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import pytest
import torch

import mpamp

from .region_programs import program
from .region_runs import failure, is_refused, valid
from .region_trees import Node, Tree, shrink

EAGER, EAGER_BLOCK = 1700, 50
COMPILED, COMPILED_BLOCK = 300, 20


def report(number: int, tree: Tree, problem: str, is_native: bool) -> str:
    """Describe a failing tree by the smallest program that fails too; empty where torch refuses that."""

    def fails(candidate: Tree) -> bool:
        try:
            return bool(failure(candidate, is_native=is_native))
        except RuntimeError:  # it doesn't run by hand any more
            return False

    if not fails(tree):
        return f"tree {number} fails after those before it only: {problem}\n{program(tree, is_native=is_native)}"
    small = shrink(tree, fails)
    if is_refused(small, failure(small)):
        return ""
    steps = f"{small.steps} steps, backward {1 + small.is_twice} times"
    return f"tree {number}, {steps}:\n{program(small, is_native=is_native)}\n{failure(small, is_native=is_native)}"


def check(numbers: range, *, shown: int = 2, **options: Any) -> None:
    """Run the trees of these numbers; fail with how many fail, and the first ones as small programs."""
    is_native = options.get("is_native", False)
    failed: dict[int, str] = {}
    for number in numbers:
        tree = valid(number, **options)
        problem = failure(tree, is_native=is_native)
        text = report(number, tree, problem, is_native) if problem and len(failed) < shown else problem
        if text:
            failed[number] = text
    assert not failed, f"{len(failed)} of {len(numbers)} trees fail: {list(failed)}\n" + "\n".join(failed.values())


@pytest.fixture(autouse=True)
def no_rules() -> Iterator[None]:
    """Leave the process without rules of a tree that didn't end."""
    yield
    mpamp.set_op_rules("cpu", None)
    torch._dynamo.reset()


def test_trees() -> None:
    check(range(55))


def test_trees_with_compiled_blocks() -> None:
    check(range(5), has_compiled=True)


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(0, EAGER, EAGER_BLOCK))
def test_many_trees(first: int) -> None:
    check(range(first, first + EAGER_BLOCK))


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(0, COMPILED, COMPILED_BLOCK))
def test_many_trees_with_compiled_blocks(first: int) -> None:
    check(range(first, first + COMPILED_BLOCK), has_compiled=True)


@pytest.mark.sweep
@pytest.mark.parametrize("first", [0, 50, 100, 150])
def test_trees_of_torchs_own_regions(first: int) -> None:
    check(range(first, first + 50), is_native=True)


# -- While another thread is traced --------------------------------------------------------------------


class Waits(torch.nn.Module):
    def __init__(self, started: Event, released: Event) -> None:
        super().__init__()
        self.wait: Callable[[], Any] = lambda: (started.set(), released.wait(120))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.wait()
        return x + 1


def export(started: Event, released: Event) -> None:
    torch.export.export(Waits(started, released), (torch.ones(2),), strict=False)


def compile_(started: Event, released: Event) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        started.set()
        released.wait(120)
        return graph

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))


@contextmanager
def on_another_thread(work: Callable[[Event, Event], None]) -> Iterator[None]:
    """Be where another thread is in the middle of ``work``."""
    started, released = Event(), Event()
    thread = Thread(target=work, args=(started, released))
    thread.start()
    try:
        assert started.wait(60)
        yield
    finally:
        released.set()
        thread.join(60)


@pytest.mark.sweep
@pytest.mark.parametrize("work", [export, compile_])
def test_trees_while_another_thread_is_traced(work: Callable[[Event, Event], None]) -> None:
    with on_another_thread(work):
        check(range(5000, 5030), without=("rules",))  # a change of rules waits until nothing compiles


# -- The fuzz itself -----------------------------------------------------------------------------------


def _leaf(name: str, number: int) -> Node:
    return Node("leaf", (), (("leaf", name),), number)


def _region(rules: dict[str, str] | None, *body: Node) -> Node:
    options = {"dtype": "bfloat16", "enabled": True, "cache": True, "persistent": False, "ops": rules, "table": None}
    return Node("region", body, tuple(options.items()), 1)


def _torchs(*body: Node) -> Node:
    return Node("torch", body, (("dtype", "bfloat16"), ("enabled", True), ("cache", False)), 1)


def _checkpoint(is_reentrant: bool, *body: Node) -> Node:
    return Node("checkpoint", body, (("reentrant", is_reentrant),), 2)


LINEAR_FP32, GELU_FP32 = {"linear": "fp32"}, {"gelu": "fp32"}
_linear, _gelu, _busy = _leaf("linear", 5), _leaf("gelu", 6), Node("thread", (Node("busy", (Node("backward"),)),))


def _in_region(rules: dict[str, str] | None, tree: Node) -> Node:
    return Node("thread", (Node("busy", (_region(rules, tree),)),))


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize(
    ("around", "inside", "backward"),
    [
        pytest.param(LINEAR_FP32, (_linear,), _busy, id="backward on a thread that had regions"),
        pytest.param(None, (_linear,), _in_region(LINEAR_FP32, Node("backward")), id="backward in a region with rules"),
        pytest.param(LINEAR_FP32, (_linear,), _in_region(None, Node("backward")), id="backward in a default region"),
        pytest.param(None, (_linear, _region(LINEAR_FP32, _gelu)), Node("backward"), id="a region with rules inside"),
        pytest.param(LINEAR_FP32, (_linear, _region(None, _gelu)), Node("backward"), id="a default region inside"),
        pytest.param(LINEAR_FP32, (_torchs(_linear, _gelu),), Node("backward"), id="torch.autocast inside"),
        pytest.param(LINEAR_FP32, (Node("inherit", (_linear,), (), 7),), _busy, id="inherited inside"),
        pytest.param(
            GELU_FP32, (Node("function", (_linear,), (("by", "third party"),), 7),), _busy, id="a Function inside"
        ),
        pytest.param(
            None,
            (Node("thread", (_region(LINEAR_FP32, _gelu),), (), 7), _linear),
            _busy,
            id="a thread with rules inside",
        ),
    ],
)
def test_known_trees(is_reentrant: bool, around: Any, inside: tuple[Node, ...], backward: Node) -> None:
    root = Node("root", (_leaf("tanh", 3), _region(around, _leaf("silu", 4), _checkpoint(is_reentrant, *inside))))
    tree = Tree(root, backward)
    assert failure(tree) == "", program(tree)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_checkpoint_in_torchs_own_region_is_torchs(is_reentrant: bool) -> None:
    """Also where a region of ours, with rules of its own, is over."""
    ours = _region({"tensordot": "fp32", "linear": "fp32"}, _leaf("tanh", 3), _leaf("tensordot", 4))
    torchs = _torchs(_checkpoint(is_reentrant, _leaf("tensordot", 5), _leaf("linear", 6)))
    for roots in ((torchs,), (ours, torchs), (Node("thread", (ours,), (), 8), torchs)):
        tree = Tree(Node("root", roots), Node("backward"))
        assert failure(tree) == "", program(tree)


def test_a_tree_is_told_by_its_number() -> None:
    assert valid(3) == valid(3)
    assert valid(3) != valid(4)


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Have programs differ from their trees in some text."""

    def replace_text(text: str, by: str) -> None:
        monkeypatch.setattr(
            "tests.sweeps.region_runs.program", lambda tree, **kwargs: program(tree, **kwargs).replace(text, by)
        )

    return replace_text


def test_a_wrong_table_is_found_and_shrunk(spoil: Callable[[str, str], None]) -> None:
    region = _region({"linear": "fp32", "gelu": "fp32"}, _leaf("gelu", 2), _leaf("linear", 3), _leaf("softmax", 4))
    tree = Tree(Node("root", (region, _leaf("tanh", 5))), Node("backward"))
    assert failure(tree) == ""
    spoil("'linear'", "'silu'")
    assert "leaf 3 gave {torch.bfloat16}, by hand torch.float32" in failure(tree)
    small = shrink(tree, lambda candidate: bool(failure(candidate)))
    assert small.root == Node("root", (_region({"linear": "fp32"}, _leaf("linear", 3)),))


def test_a_wrong_gradient_is_found(spoil: Callable[[str, str], None]) -> None:
    tree = Tree(Node("root", (_region(None, _leaf("linear", 2)),)), Node("backward"))
    spoil("x = y", "x = y.detach() + 1.0078125 * (y - y.detach())")  # 2**-7 off
    assert "gradient of w2 is off" in failure(tree)


def test_state_left_behind_is_found(spoil: Callable[[str, str], None]) -> None:
    tree = Tree(Node("root", (_leaf("linear", 2),)), Node("backward"))
    spoil("return x", "torch.set_autocast_enabled('cpu', True); return x")
    assert "torch's state: cpu (False, torch.bfloat16) -> (True, torch.bfloat16)" in failure(tree)
    spoil("return x", "torch.autocast_increment_nesting(); return x")
    assert "torch's state: nesting 0 -> 1" in failure(tree)
