"""Random trees of regions, checkpoints, Functions, threads and compiled blocks: what they are, and how one grows.

A tree maps a tensor of shape (4, 8) to another; each node maps the value so far. It knows nothing of autocast: what its
nodes mean is said twice, by ``region_programs`` as a program and by ``region_reference`` as casts made by hand.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

DTYPES = ("bfloat16", "bfloat16", "float16", "float32")
LOWER = ("bfloat16", "bfloat16", "float16")


@dataclass(frozen=True)
class Leaf:
    """One op of one call; expressions over ``x`` and the parameters ``w``, ``b``."""

    op: str
    """The overload whose row decides."""
    call: str
    params: dict[str, tuple[int, ...]] = field(default_factory=dict)
    before: str = "x"
    after: str = "y"
    dtype: str = "float32"
    """The parameters' own."""


_W, _B = {"w": (8, 8)}, {"b": (8,)}
LEAVES = {
    "linear": Leaf("linear", "F.linear(x, w, b)", _W | _B, "x.float()"),
    "matmul": Leaf("matmul", "torch.matmul(x, w)", _W, "x.float()"),
    "bmm": Leaf("bmm", "torch.bmm(x, w)", {"w": (1, 8, 8)}, "x.float().unsqueeze(0)", "y.squeeze(0)"),
    "tensordot": Leaf("tensordot", "torch.tensordot(x, w, 1)", _W, "x.float()"),
    "softmax": Leaf("softmax.int", "torch.softmax(x, -1)", after="y * 2.0"),
    "log_softmax": Leaf("log_softmax.int", "torch.log_softmax(x, -1)"),
    "gelu": Leaf("gelu", "F.gelu(x)"),
    "gelu of float32": Leaf("gelu", "F.gelu(x)", before="x.float()"),
    "gelu of bfloat16": Leaf("gelu", "F.gelu(x)", before="x.bfloat16()"),
    "silu": Leaf("silu", "F.silu(x)"),
    "tanh": Leaf("tanh", "torch.tanh(x)"),
    "exp": Leaf("exp", "torch.exp(x)", before="x * 0.1"),
    "layer_norm": Leaf("layer_norm", "F.layer_norm(x, (8,), w, b)", {"w": (8,), "b": (8,)}),
    "cat": Leaf("cat", "torch.cat([x, w], -1)", {"w": (4, 4)}, "x.float()[:, :4]"),
    "cat of mixed": Leaf("cat", "torch.cat([x, w], -1)", {"w": (4, 4)}, "x.float()[:, :4]", dtype="bfloat16"),
    "logsumexp": Leaf("logsumexp", "torch.logsumexp(x, -1, keepdim=True)", after="x * 0.5 + y"),
    "cumsum": Leaf("cumsum", "torch.cumsum(x, -1)", after="y * 0.3"),
    "mse_loss": Leaf("mse_loss", "F.mse_loss(x, w)", {"w": (4, 8)}, "x.float()", "x * 0.5 + y"),
    "prelu": Leaf("prelu", "F.prelu(x, w)", {"w": (1,)}, "x.float()"),
    "vector_norm": Leaf("linalg_vector_norm", "torch.linalg.vector_norm(x, 2, -1, True)", after="x * 0.5 + y"),
}
SHARED = "linear of shared"
"""A linear whose weight other leaves use too: kept casts sum its gradients in lower precision, so those are compared
loosely."""
LEAVES[SHARED] = Leaf("linear", "F.linear(x, shared_w, shared_b)", before="x.float()")
POLICIES = ("fp32", "lower_precision_fp", "fallthrough", "promote")
RULED = tuple(sorted({leaf.op.partition(".")[0] for leaf in LEAVES.values()}))
COMPILED_RULES = ({"linear": "fp32"}, {"gelu": "lower_precision_fp", "matmul": "fp32"}, {"softmax": "fp32"}, None, None)
"""Few, for torch's state tells few tables apart inside of compiled functions."""
WHOLE_TABLES = (
    {"linear": "lower_precision_fp", "softmax": "fp32", "gelu": "fp32"},
    {"matmul": "lower_precision_fp", "cat": "promote", "softmax": "lower_precision_fp", "linear": "fp32"},
)
"""Rows of whole tables, which no rules of the process change."""

RECOMPUTED = ("checkpoint", "sequential", "wrapper", "function")
BRANCHING = ("parallel",)


@dataclass(frozen=True)
class Node:
    """One node; ``body`` runs in it one after the other, or at once in what is ``BRANCHING``."""

    kind: str
    body: tuple[Node, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    id: int = 0

    def option(self, name: str) -> Any:
        return dict(self.options).get(name)

    def walk(self) -> Iterator[Node]:
        yield self
        for child in self.body:
            yield from child.walk()


@dataclass(frozen=True)
class Tree:
    """A root, and how its backward is called."""

    root: Node
    backward: Node
    """In what the backward runs: nodes around one of the kind ``backward``."""
    is_twice: bool = False
    """Whether backward runs twice over the same graph."""
    steps: int = 1
    """How often it all runs; the weights are written between."""

    def kinds(self) -> set[str]:
        return {node.kind for node in self.root.walk()}

    def leaves(self) -> list[Node]:
        return [node for node in self.root.walk() if node.kind == "leaf"]


@dataclass
class Grower:
    """Grows one tree from a random generator, node by node."""

    rng: random.Random
    budget: int = 18
    is_native: bool = False
    """Only what torch alone can run."""
    has_compiled: bool = False
    without: tuple[str, ...] = ()
    """Kinds of nodes that it doesn't use."""
    changes_rules: bool = False
    count: int = 0

    def tree(self) -> Tree:
        self.budget = self.rng.randint(2, self.budget)
        self.changes_rules = not self.is_native and self.rng.random() < 0.25
        body = self.body(0, frozenset())
        while self.has_compiled and not any(n.kind == "compiled" for b in body for n in b.walk()):
            body += (self.node("compiled", 1, frozenset()),)
        is_selective = any(n.option("selective") for b in body for n in b.walk())  # torch runs its backward once
        is_twice = self.rng.random() < 0.15 and not is_selective
        return Tree(Node("root", body), self.backward(), is_twice, steps=2 if self.rng.random() < 0.2 else 1)

    def next_id(self) -> int:
        self.count += 1
        return self.count

    def backward(self) -> Node:
        ends = Node("backward")
        choice = self.rng.choice(["here", "here", "region", "torch", "thread", "thread", "busy thread", "busy thread"])
        if choice in ("region", "busy thread"):
            ends = Node("region", (ends,), self.region_options(frozenset()), self.next_id())
        if choice == "torch":
            ends = Node("torch", (ends,), self.torch_options(), self.next_id())
        if choice == "busy thread":
            ends = Node("busy", (ends,), (), self.next_id())
        return Node("thread", (ends,), (), self.next_id()) if "thread" in choice else ends

    def body(self, depth: int, within: frozenset[str]) -> tuple[Node, ...]:
        nodes = []
        for _ in range(self.rng.randint(1, 3)):
            kind = self.kind(depth, within)
            nodes.append(self.node(kind, depth, within))
        return tuple(nodes)

    def kind(self, depth: int, within: frozenset[str]) -> str:
        if depth >= 6 or self.budget <= 0:
            return "leaf"
        weights = {"leaf": 34, "region": 16, "torch": 6, "checkpoint": 12, "residual": 3}
        if "compiled" not in within:
            weights |= {"function": 6, "sequential": 2, "wrapper": 2, "thread": 2, "parallel": 2, "catch": 3}
            weights |= {"decorated": 3, "absent": 1, "shared region": 2}
            if not within & {"plain"} and not self.is_native:
                weights["inherit"] = 3
            if not within & {"recomputed"}:
                weights["backward here"] = 3
                if self.changes_rules and "parallel" not in within:
                    weights["rules"] = 5
            if self.has_compiled:
                weights["compiled"] = 8
        for name in (*self.without, *(("rules", "absent") if self.is_native else ())):
            weights.pop(name, None)
        return self.rng.choices(list(weights), list(weights.values()))[0]

    def node(self, kind: str, depth: int, within: frozenset[str]) -> Node:
        self.budget -= 1
        name = self.next_id()
        if kind == "leaf":
            leaf = self.rng.choice(sorted(LEAVES))
            if leaf == SHARED and (self.is_native or "plain" in within):
                leaf = "linear"  # torch's own cache serves one dtype's cast to a nested region of the other
            return Node("leaf", (), (("leaf", leaf),), name)
        if kind == "rules":
            return Node("rules", (), (("ops", self.some_rules(0.3)),), name)
        options: tuple[tuple[str, Any], ...] = ()
        inner = set(within)
        if kind in ("region", "decorated", "shared region"):
            options = self.region_options(within)
            inner = (inner - {"float32"}) | ({"float32"} if dict(options)["dtype"] == "float32" else set())
            if kind != "region":
                options += (("mutated", self.rng.random() < 0.3),)
        elif kind == "torch":
            options, inner = self.torch_options(), (inner | {"plain"}) - {"float32"}
        elif kind in RECOMPUTED:
            options, inner = self.recompute_options(kind, within), inner | {"recomputed"}
        elif kind == "thread":
            inner -= {"plain"}
        elif kind == "parallel":
            inner = (inner | {"parallel"}) - {"plain"}
        elif kind == "compiled":
            options = (("backend", self.rng.choice(["eager", "aot_eager", "aot_eager"])),)
            inner |= {"compiled"}
        body = self.body(depth + 1, frozenset(inner))
        # Two at once, for the order of a sum of three gradients isn't ours to say.
        return Node(kind, body[:2] if kind == "parallel" else body, options, name)

    def region_options(self, within: frozenset[str]) -> tuple[tuple[str, Any], ...]:
        if "compiled" in within:
            ops = self.rng.choice(COMPILED_RULES)
            return (("dtype", self.rng.choice(LOWER)), ("enabled", self.rng.random() > 0.15), ("ops", ops))
        dtype = self.rng.choice(LOWER if self.is_native else DTYPES)
        table = None
        if not self.is_native and (self.rng.random() < 0.12 or (self.changes_rules and "recomputed" in within)):
            table = self.rng.randrange(len(WHOLE_TABLES))
        return (
            ("dtype", dtype),
            ("enabled", self.rng.random() > 0.12),
            ("cache", self.rng.random() > 0.2),
            ("persistent", self.rng.random() < 0.2),
            ("ops", None if table is not None else self.some_rules(0.5)),
            ("table", table),
        )

    def some_rules(self, none: float) -> dict[str, Any] | None:
        if self.is_native or self.rng.random() < none:
            return None
        rules: dict[str, Any] = {}
        for op in self.rng.sample(RULED, self.rng.randint(1, 5)):
            policy = self.rng.choice(POLICIES)
            rules[op] = policy if self.rng.random() > 0.15 else {self.rng.choice(LOWER): policy}
        return rules

    def torch_options(self) -> tuple[tuple[str, Any], ...]:
        flags = (("enabled", self.rng.random() > 0.15), ("cache", self.rng.random() > 0.4))
        return (("dtype", self.rng.choice(LOWER)), *flags)

    def recompute_options(self, kind: str, within: frozenset[str]) -> tuple[tuple[str, Any], ...]:
        if kind == "function":
            kinds = ["third party", "torch.amp"] + ["mpamp", "mpamp float32"] * (not self.is_native)
            if "float32" in within:
                kinds.remove("third party")  # torch.autocast, which it enters, refuses float32
            return (("by", self.rng.choice(kinds)),)
        is_reentrant = self.rng.random() < 0.5 and "compiled" not in within
        options: list[tuple[str, Any]] = [("reentrant", is_reentrant)]
        if kind == "checkpoint" and not is_reentrant and "compiled" not in within:
            options += [("determinism_check", self.rng.choice(["default", "none"]))]
            options += [("early_stop", self.rng.random() < 0.6)]
            options += [("selective", self.rng.random() < 0.25)]
        if kind == "sequential":
            options += [("segments", self.rng.randint(1, 2))]
        return tuple(options)


def grow(number: int, attempt: int = 0, **kwargs: Any) -> Tree:
    """Return the tree of that number."""
    return Grower(random.Random(f"{number}/{attempt}"), **kwargs).tree()


# -- Shrinking -----------------------------------------------------------------------------------------

SIMPLEST = {
    "ops": None,
    "table": None,
    "persistent": False,
    "cache": True,
    "enabled": True,
    "selective": False,
    "mutated": False,
}


def smaller(tree: Tree) -> Iterator[Tree]:
    """Yield trees that are one step smaller, largest steps first."""
    if tree.steps > 1:
        yield replace(tree, steps=1)
    if tree.is_twice:
        yield replace(tree, is_twice=False)
    for backward in _smaller(tree.backward):
        if any(n.kind == "backward" for n in backward.walk()):
            yield replace(tree, backward=backward)
    if tree.backward.kind != "backward":
        yield replace(tree, backward=Node("backward"))
    for root in _smaller(tree.root):
        if root.body:
            yield replace(tree, root=root)


def _smaller(node: Node) -> Iterator[Node]:
    for index, child in enumerate(node.body):
        before, after = node.body[:index], node.body[index + 1 :]
        yield replace(node, body=before + after)
        if child.body:
            yield replace(node, body=before + child.body + after)
    for name, simple in SIMPLEST.items():
        value = node.option(name)
        if name in dict(node.options) and value != simple:
            yield replace(node, options=tuple((k, simple if k == name else v) for k, v in node.options))
        if isinstance(value, dict) and len(value) > 1:
            for op in value:
                kept = {k: v for k, v in value.items() if k != op}
                yield replace(node, options=tuple((k, kept if k == name else v) for k, v in node.options))
    for index, child in enumerate(node.body):
        for shrunk in _smaller(child):
            if shrunk.body or not child.body:
                yield replace(node, body=(*node.body[:index], shrunk, *node.body[index + 1 :]))


def shrink(tree: Tree, fails: Any, limit: int = 300) -> Tree:
    """Return a small tree that ``fails`` too; ``limit`` bounds the trees tried."""
    is_shrunk = True
    while is_shrunk:
        is_shrunk = False
        for candidate in smaller(tree):
            limit -= 1
            if limit < 0:
                return tree
            if fails(candidate):
                tree, is_shrunk = candidate, True
                break
    return tree
