"""Run a tree of regions as a program and by hand, and say how they differ."""

from __future__ import annotations

import traceback
import warnings
from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F

import mpamp

from .region_names import NAMES, call_on_thread
from .region_programs import program
from .region_reference import NATIVE, Reference
from .region_trees import LEAVES, Tree, grow

DEVICES = ("cpu", "cuda", "xpu", "mps", "ipu", "hpu", "xla", "mtia", "maia", "privateuseone")


def autocast_state() -> dict[str, Any]:
    """Return everything that torch keeps about autocast for the calling thread."""
    state: dict[str, Any] = {"cache": torch.is_autocast_cache_enabled()}
    torch.autocast_increment_nesting()
    state["nesting"] = torch.autocast_decrement_nesting()
    for device in DEVICES:
        try:
            state[device] = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        except RuntimeError as error:
            state[device] = str(error)[:40]
    return state


def plain_dtypes() -> list[torch.dtype]:
    """Return what ops give under a plain torch.autocast, and outside of it."""
    x = torch.ones(2, 2)
    low = x.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = [F.linear(x, x), torch.tensordot(x, x, 1), low.softmax(0), F.gelu(x), F.gelu(low), low.exp()]
    return [t.dtype for t in [*inside, F.linear(x, x), low.softmax(0)]]


# -- Runs ----------------------------------------------------------------------------------------------


def parameters(tree: Tree) -> dict[str, torch.Tensor]:
    """Return new weights of a tree's leaves, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    wanted = {"shared_w": ((8, 8), "float32"), "shared_b": ((8,), "float32")}
    for node in tree.leaves():
        leaf = LEAVES[node.option("leaf")]
        wanted |= {f"{name}{node.id}": (shape, leaf.dtype) for name, shape in leaf.params.items()}
    params = {}
    for name, (shape, dtype) in wanted.items():
        values = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        params[name] = torch.nn.Parameter(values.to(getattr(torch, dtype)))
    return params


Step = tuple[torch.Tensor, dict[str, "torch.Tensor | None"]]
"""The output, and the gradients by name."""


def _steps(tree: Tree, params: dict[str, torch.Tensor], forward: Any, backward: Any) -> list[Step]:
    steps = []
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))
    for _ in range(tree.steps):
        out = forward(x)
        loss = (out.float() * weight).sum()
        for again in range(1 + tree.is_twice):
            backward(loss, tree.is_twice and not again)
        steps.append((out.detach(), {n: p.grad for n, p in {**params, "x": x}.items()}))
        with torch.no_grad():
            for param in (*params.values(), x):
                param.grad = None
                param.mul_(0.9)
    return steps


def run_by_hand(tree: Tree, is_native: bool = False) -> tuple[list[Step], Reference]:
    params = parameters(tree)
    reference = Reference(params, NATIVE if is_native else mpamp.get_op_table("cpu"))

    def forward(x: torch.Tensor) -> torch.Tensor:
        return reference.run(tree, x)

    return _steps(tree, params, forward, lambda loss, retain: loss.backward(retain_graph=retain)), reference


def run_program(tree: Tree, is_native: bool) -> tuple[list[Step], dict[int, set[torch.dtype]]]:
    params = parameters(tree)
    seen: dict[int, set[torch.dtype]] = defaultdict(set)

    def note(leaf: int, y: torch.Tensor) -> torch.Tensor:
        seen[leaf].add(y.dtype)
        return y

    names = {**NAMES, **params, "seen": note}
    source = program(tree, is_native=is_native)
    exec(compile(source, "<tree>", "exec"), names)
    return _steps(tree, params, names["tree"], names["backward"]), dict(seen)


def failure(tree: Tree, *, is_native: bool = False) -> str:
    """Return what goes wrong in a tree, empty if nothing does."""
    kinds = tree.kinds()
    expected, reference = run_by_hand(tree, is_native)
    if "compiled" in kinds:
        torch._dynamo.reset()

    def work() -> tuple[Any, ...]:
        before = autocast_state()
        ran: Any = None
        problem = ""
        try:
            ran = run_program(tree, is_native)
        except Exception as error:
            at = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == "<tree>"]
            problem = f"{type(error).__name__} (lines {at}): {str(error)[:300]}"
        return ran, problem, before, autocast_state(), plain_dtypes()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ran, problem, before, after, plain = call_on_thread(work)
            if "rules" in kinds:
                mpamp.set_op_rules("cpu", None)
            others = call_on_thread(plain_dtypes)
        except TimeoutError as error:
            return f"hangs: {error}"
    problems = [problem] if problem else compare(tree, expected, reference, *ran)
    left = [f"{name} {value} -> {after[name]}" for name, value in before.items() if after[name] != value]
    problems += [f"torch's state: {', '.join(left)}"] if left else []
    if plain != PLAIN or others != PLAIN:
        problems.append(f"plain torch.autocast afterwards gives {plain}, on another thread {others}, not {PLAIN}")
    return "\n".join(problems)


def is_refused(tree: Tree, problem: str) -> bool:
    """Tell whether torch raises that with its own regions, too: such as for a compiled backward in one of them."""
    torch._dynamo.reset()
    try:
        call_on_thread(lambda: run_program(tree, True))
    except RuntimeError as error:
        return str(error)[:300] in problem
    return False


BF16, FP32 = torch.bfloat16, torch.float32
HALFS_MAX = torch.finfo(torch.float16).max
PLAIN = [BF16, BF16, BF16, FP32, BF16, BF16, FP32, BF16]


def compare(
    tree: Tree, expected: list[Step], reference: Reference, steps: list[Step], seen: dict[int, set[torch.dtype]]
) -> list[str]:
    problems = []
    for leaf, dtypes in seen.items():
        if dtypes != {reference.seen[leaf]}:
            problems.append(f"leaf {leaf} gave {dtypes}, by hand {reference.seen[leaf]}")
    is_fused = any(n.option("backend") == "aot_eager" for n in tree.root.walk())
    loose = loose_gradients(tree)
    for number, ((out, grads), (want, want_grads)) in enumerate(zip(steps, expected, strict=True)):
        problems += _difference(f"step {number}: output", out, want, is_fused)
        for name, grad in grads.items():
            is_loose = is_fused or name in loose or name.startswith("shared")
            problems += _difference(f"step {number}: gradient of {name}", grad, want_grads[name], is_loose)
    return problems


def loose_gradients(tree: Tree) -> set[str]:
    """Return the parameters whose gradients come from a backward in a region, where torch casts backward's ops too."""
    nodes = [tree.root] if tree.backward.kind in ("region", "torch") or len(list(tree.backward.walk())) > 2 else []
    nodes += [n for n in tree.root.walk() if n.kind == "backward here"]
    leaves = [leaf for node in nodes for leaf in node.walk() if leaf.kind == "leaf"]
    names = {f"{name}{leaf.id}" for leaf in leaves for name in LEAVES[leaf.option("leaf")].params}
    return names | ({"x"} if tree.root in nodes else set())


def _difference(what: str, got: torch.Tensor | None, want: torch.Tensor | None, is_loose: bool) -> list[str]:
    if got is None or want is None:
        return [] if got is want else [f"{what} is {'absent' if got is None else 'there'}, by hand it is not"]
    if got.dtype is not want.dtype:
        return [f"{what} is {got.dtype}, by hand {want.dtype}"]
    difference = (got.double() - want.double()).abs().max().item()
    largest = want.double().abs().max().item()
    # One number is a sum over all of a batch, whose parts may cancel out.
    allowed = 0.15 * largest + (0.02 if want.numel() == 1 else 1e-3) if is_loose else 0.0
    if (
        difference <= allowed
        or torch.equal(got, want)
        or (is_loose and (largest > HALFS_MAX or not got.isfinite().all()))
    ):
        return []
    return [f"{what} is off by {difference:.3g} (of {want.abs().max().item():.3g}; {allowed:.3g} is allowed)"]


def valid(number: int, **kwargs: Any) -> Tree:
    """Return the tree of that number that runs by hand: some mixes of dtypes, torch itself refuses."""
    for attempt in range(50):
        tree = grow(number, attempt, **kwargs)
        try:
            run_by_hand(tree, kwargs.get("is_native", False))
        except (RuntimeError, mpamp.MpampError):
            continue
        return tree
    raise AssertionError(f"no tree {number} runs by hand")
