"""torch's operator database: under default regions, under rules for every op and after them, transformed, compiled.

Every tenth op always; all of them by ``pytest -m sweep tests/test_operator_database.py -s``, which prints the counts.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, jvp, vmap

import mpamp
from mpamp import CastPolicy
from tests.operator_database import (
    BRAIN,
    FULL,
    HALF,
    Call,
    calls,
    dtypes_of,
    in_process,
    is_near,
    is_same,
    outcome,
    rules,
)
from tests.torches import GIVES_KERNELS, MASKED_GRADIENTS

pytest.importorskip("expecttest", reason="torch's operator database needs it")

STEPS = [10, pytest.param(1, marks=pytest.mark.sweep)]
CHUNK = 60


@functools.cache
def samples(step: int, *, with_grad: bool = False) -> list[Call]:
    return list(calls(step, 1 if step > 1 else 2, grad=with_grad))


def plain(dtype: torch.dtype) -> Callable[[], Any]:
    return lambda: torch.autocast("cpu", dtype)


def region(dtype: torch.dtype, **options: Any) -> Callable[[], Any]:
    return lambda: mpamp.autocast("cpu", dtype, **options)


def show(what: str, counts: Counter[str], wrong: list[Any]) -> None:
    print(f"\n{what}: {dict(counts)}; {len(wrong)} wrong", *wrong[:40], sep="\n   ")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
def test_what_works_under_torchs_autocast_works_in_a_default_region(dtype: torch.dtype, step: int) -> None:
    """Backward passes included; values as torch's, or as in float32."""
    counts: Counter[str] = Counter()
    wrong: list[Any] = []
    for call in samples(step, with_grad=True):
        torchs, ours = (outcome(call.gradients, context(dtype)) for context in (plain, region))
        counts[f"torch {torchs[0]}, mpamp {ours[0]}"] += 1
        if torchs[0] == "gives" and ours[0] == "raises":
            wrong.append((call.name, ours))
        elif torchs[0] == "gives" and not is_near(ours, torchs, call.name, 0.05):
            full = outcome(call.gradients, lambda: torch.autocast("cpu", enabled=False))
            counts["values unlike torch's"] += 1
            if not is_near(ours, full, call.name, 0.1):
                wrong.append((call.name, "values"))
    show(f"default region, {dtype}", counts, wrong)
    assert counts["torch gives, mpamp gives"] > len(samples(step)) / 2
    assert not [w for w in wrong if w[0] not in NOT_REPEATABLE]


NOT_REPEATABLE: set[str] = set()
"""Ops whose results depend on more than arguments and seed."""


@pytest.mark.parametrize("mode", ["grad mode", "inference mode"])
@pytest.mark.parametrize(
    ("step", "policy"),
    [(10, "fp32"), (10, "lower_precision_fp")]
    + [pytest.param(1, p.value, marks=pytest.mark.sweep) for p in CastPolicy],
)
def test_rules_for_every_op_leave_plain_autocast_alone(step: int, policy: str, mode: str) -> None:
    """Before, inside of and after a region with the rules, in a process that has had no region."""
    listed, enter = samples(step), torch.inference_mode if mode == "inference mode" else torch.enable_grad
    rules(policy)

    def run(some: list[Call]) -> tuple[Counter[str], list[Any]]:
        counts: Counter[str] = Counter()
        wrong = []
        with enter():
            before = [outcome(call, plain(BRAIN)) for call in some]
            inside = [outcome(call, region(BRAIN, ops=rules(policy))) for call in some]
            after = [outcome(call, plain(BRAIN)) for call in some]
        for call, *seen in zip(some, before, inside, after, strict=True):
            counts[f"before {seen[0][0]}, inside {seen[1][0]}, after {seen[2][0]}"] += 1
            if seen[1][:2] == ("raises", "RecursionError") or not is_same(seen[0], seen[2], call.name):
                wrong.append((call.name, *(o[:3] if o[0] == "raises" else o[0] for o in seen)))
        return counts, wrong

    counts: Counter[str] = Counter()
    wrong: list[Any] = []
    for i in range(0, len(listed), CHUNK):
        found = in_process(functools.partial(run, listed[i : i + CHUNK]))
        if isinstance(found, str):
            wrong.append(([c.name for c in listed[i : i + CHUNK]], found))
        else:
            counts += found[0]
            wrong += found[1]
    show(f"{len(rules(policy))} rules {policy}, {mode}", counts, wrong)
    assert not wrong
    assert counts["before gives, inside gives, after gives"] > len(listed) / 2


Transformed = Callable[[Call], Any]


def _vmap(call: Call) -> Any:
    return vmap(call, randomness="same")(call.input[None])


def _grad(call: Call) -> Any:
    return grad(lambda x: sum(t.float().sum() for t in _floats(call(x))))(call.input)


def _jvp(call: Call) -> Any:
    return jvp(call, (call.input,), (torch.ones_like(call.input),))[0]


def _compiled(call: Call) -> Any:
    torch._dynamo.reset()
    return torch.compile(call, backend="aot_eager")(call.input)


def _floats(result: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.is_floating_point()]


TRANSFORMS: dict[str, Transformed] = {"vmap": _vmap, "grad": _grad, "jvp": _jvp, "aot_eager": _compiled}
OTHERWISE: dict[str, set[str]] = {"vmap": set(), "grad": set(), "jvp": set(), "aot_eager": set()}
OTHERWISE["grad"] |= set() if MASKED_GRADIENTS else {"masked.std"}
if not GIVES_KERNELS:
    OTHERWISE["grad"] |= {"nn.functional.local_response_norm", "nn.functional.multi_head_attention_forward"}
"""Ops that have other dtypes there than in an eager call, or that torch's own autocast fails with there, too."""


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transformed_ops_have_the_dtypes_of_eager_ones(transform: str, step: int) -> None:
    """Where the transform can take the op at all."""
    run, counts, wrong = TRANSFORMS[transform], Counter[str](), []
    part = 1 if transform != "aot_eager" else 20 if step == 1 else 4  # compiling takes long
    for call in samples(step)[::part]:
        if not isinstance(call.input, torch.Tensor) or call.input.dtype is not FULL:
            continue
        transformed = functools.partial(run, call)
        bare = outcome(transformed, lambda: torch.autocast("cpu", enabled=False))
        eager = outcome(functools.partial(_eager_grad, call) if transform == "grad" else call, region(BRAIN))
        if bare[0] == "raises" or eager[0] == "raises":
            counts["can't be taken"] += 1
            continue
        found = outcome(transformed, region(BRAIN))
        expected, dtypes = [_dtype(a) for a in eager[1:]], [_dtype(a) for a in found[1:]]
        if found[0] == "gives" and dtypes == expected:
            counts["same"] += 1
        else:
            counts["other"] += 1
            torchs = outcome(transformed, plain(BRAIN))
            wrong.append((call.name, expected, found[:3] if found[0] == "raises" else dtypes, f"torch {torchs[0]}"))
    show(transform, counts, wrong)
    assert not [w for w in wrong if w[0] not in OTHERWISE[transform]]
    assert counts["same"] > len(samples(step)[::part]) / 3


def _dtype(leaf: Any) -> Any:
    return dtypes_of(leaf)[0] if isinstance(leaf, tuple) else ""


def _eager_grad(call: Call) -> Any:
    leaf = call.input.detach().clone().requires_grad_()
    return torch.autograd.grad(sum(t.float().sum() for t in _floats(call(leaf))), leaf)[0]
