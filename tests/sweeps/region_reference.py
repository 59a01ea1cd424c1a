"""What a tree of regions computes, by casts made by hand with autocast off: the reference, and its dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from mpamp import OpTable

from .region_trees import LEAVES, WHOLE_TABLES, Leaf, Node, Tree

CASTABLE = (torch.float32, torch.bfloat16, torch.float16)
NATIVE = OpTable.named("native", "cpu")
INNER = {"tensordot": "mm"}
"""What runs, by its own row, inside of an op that the table doesn't list."""


@dataclass(frozen=True)
class State:
    """What holds at one point of a program."""

    enabled: bool = False
    dtype: torch.dtype = torch.bfloat16
    table: OpTable = NATIVE
    """torch's own where no region of ours is open."""


OUTSIDE = State()


def whole_table(index: int) -> OpTable:
    return OpTable(WHOLE_TABLES[index], name=f"whole {index}")


@dataclass
class Reference:
    """Runs a tree on ``params`` without autocast, checkpoints, threads or compilers."""

    params: Mapping[str, torch.Tensor]
    base: OpTable
    """The device's table without rules of the process."""
    seen: dict[int, torch.dtype] = field(default_factory=dict)
    """The dtype that each leaf gives."""

    def __post_init__(self) -> None:
        self.table = self.base

    def run(self, tree: Tree, x: torch.Tensor) -> torch.Tensor:
        return self.sequence(tree.root.body, x, OUTSIDE)

    def sequence(self, nodes: tuple[Node, ...], x: torch.Tensor, state: State) -> torch.Tensor:
        for node in nodes:
            x = self.node(node, x, state)
        return x

    def node(self, node: Node, x: torch.Tensor, state: State) -> torch.Tensor:
        kind = node.kind
        if kind == "leaf":
            return self.leaf(node, x, state)
        if kind == "rules":
            ops = node.option("ops")
            self.table = self.base if ops is None else self.base.override(ops)
            return x
        if kind == "residual":
            return x * 0.5 + self.sequence(node.body, x * 1.0, state)
        if kind == "parallel":
            outs = [self.sequence((child,), x * 1.0, OUTSIDE) for child in node.body]
            return torch.stack([out.float() for out in outs]).sum(0)
        if kind == "backward here":
            start = x.detach().requires_grad_()
            self.sequence(node.body, start, state).float().sum().backward()
            return x
        if kind == "function" and node.option("by") == "mpamp float32" and state.enabled:
            return self.sequence(node.body, x.float(), replace(state, enabled=False))
        return self.sequence(node.body, x, self.inside(node, state))

    def inside(self, node: Node, state: State) -> State:
        """Return the state in a node that changes nothing else."""
        if node.kind == "thread":
            return OUTSIDE
        if node.kind == "torch":
            return replace(state, enabled=node.option("enabled"), dtype=getattr(torch, node.option("dtype")))
        if node.kind not in ("region", "decorated", "shared region"):
            return state
        if not node.option("enabled"):
            return replace(state, enabled=False)
        ops, whole, table = node.option("ops"), node.option("table"), self.table
        if whole is not None:
            table = whole_table(whole)
        elif ops is not None:
            table = table.override(ops)
        return State(True, getattr(torch, node.option("dtype")), table)

    def leaf(self, node: Node, x: torch.Tensor, state: State) -> torch.Tensor:
        leaf = LEAVES[node.option("leaf")]
        names = {n: self.params[f"{n}{node.id}"] for n in leaf.params} | {
            n: p for n, p in self.params.items() if n.startswith("shared")
        }
        start = _evaluate(leaf.before, {"x": x})
        given, call = {"x": start, **names}, leaf.call
        policy = self.policy(leaf, state) if state.enabled else None
        if policy == "fp32_set_opt_dtype":
            call = f"{call[:-1]}, dtype=torch.float32)"
        elif policy is not None:
            given = self.cast(leaf, given, policy, state.dtype)
        y = _evaluate(call, given)
        self.seen[node.id] = y.dtype
        return _evaluate(leaf.after, {"x": start, "y": y})

    def policy(self, leaf: Leaf, state: State) -> str | None:
        found = state.table.policy(leaf.op, state.dtype)
        if found is None and leaf.op in INNER:
            found = state.table.policy(INNER[leaf.op], state.dtype)
        return None if found is None else found.value

    def cast(
        self, leaf: Leaf, given: dict[str, torch.Tensor], policy: str, lower: torch.dtype
    ) -> dict[str, torch.Tensor]:
        used = {n: t for n, t in given.items() if n in leaf.call and t.dtype in CASTABLE}
        target = None
        if policy == "lower_precision_fp":
            target = lower
        elif policy == "fp32" or (policy == "promote" and len({t.dtype for t in used.values()}) > 1):
            target = torch.float32
        return given if target is None else {**given, **{n: t.to(target) for n, t in used.items()}}


def _evaluate(expression: str, names: dict[str, Any]) -> torch.Tensor:
    return eval(expression, {"torch": torch, "F": F, **names})  # type: ignore[no-any-return]
