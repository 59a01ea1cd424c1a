"""Rows that mpamp's default tables have and torch's don't: each call runs in the dtypes that its policy says."""

from __future__ import annotations

import itertools

import pytest
import torch

import mpamp
from mpamp import CastPolicy
from mpamp.oplists import load_table
from tests.parity.observe import (
    PLACES,
    Observation,
    can_be_called,
    device_of,
    dtypes_taken,
    forms,
    is_here,
    none,
    observe,
    overload,
    stand_ins,
)

BRAIN, HALF = torch.bfloat16, torch.float16


def _added(place: str) -> dict[str, dict[torch.dtype, CastPolicy]]:
    """Return the policies of a default table, by region dtype, where the native one has none."""
    default, native = (load_table(name, device_of(place)) for name in ("default", "native"))
    found: dict[str, dict[torch.dtype, CastPolicy]] = {}
    for op, lower in itertools.product(default, (BRAIN, HALF)):
        policy = default.policy(op, lower)
        if policy is not None and native.policy(op, lower) is None:
            found.setdefault(op, {})[lower] = policy
    return found


ADDED = {place: _added(place) for place in PLACES if is_here(place)}
WRITES = {"aten::index_copy_"}
"""In place: tests/oplists/test_buffer_writes.py has these."""
NEEDS_CARD = {"aten::_grouped_mm"}
"""For cards alone in torch 2.8."""
ON_HOST = {"aten::choose_qparams_optimized"}
ROWS = [(place, op) for place, added in ADDED.items() for op in added if can_be_called(op, place) and op not in WRITES]


def _expected_form(policy: CastPolicy, form: str) -> str | None:
    """Return the form in which the same call, with no autocast, is what a region makes of ``form``."""
    if "float64" in form:
        return form
    if policy is CastPolicy.FP32:
        return "float32"
    if policy is CastPolicy.LOWER_PRECISION_FP:
        return "lower"
    if policy is CastPolicy.PROMOTE:
        return "float32" if len(forms(BRAIN)[form]) > 1 else form
    return None


def _seen(observation: Observation) -> tuple[list[str], str]:
    return observation["ops"], observation["out"]


@pytest.mark.parametrize(("place", "op"), ROWS)
def test_added_row(place: str, op: str) -> None:
    for lower, policy in ADDED[place][op].items():
        fitting = [name for name, dtypes in forms(lower).items() if len(dtypes) <= dtypes_taken(overload(op))]
        for form in (name for name in fitting if name != "parameters"):
            _check(place, op, lower, form, policy)


def _check(place: str, op: str, lower: torch.dtype, form: str, policy: CastPolicy) -> None:
    expected = _expected_form(policy, form)
    with stand_ins(place):
        ours = observe(overload(op), place, lower, form, mpamp.autocast)
        if expected is not None:
            assert _seen(ours) == _seen(observe(overload(op), place, lower, expected, none)), (lower, form)
        else:
            assert ours["out"] == "-> float32", (lower, form)


@pytest.mark.parametrize(("place", "op"), ROWS)
def test_added_row_is_seen(place: str, op: str) -> None:
    """The arguments reach the op."""
    with stand_ins(place):
        seen = observe(overload(op), place, BRAIN, "float32", none)
    if op in ON_HOST and place != "cpu":
        pytest.skip("it reads the memory of its tensor, and fake ones have none")
    if op in NEEDS_CARD and "'CPU' backend" in seen["reason"]:
        pytest.skip("this torch has it for cards alone")
    assert seen["ops"]
    assert place != "cpu" or seen["out"] != "raises", seen["reason"]


def test_enough_rows_are_added() -> None:
    assert len(ROWS) > 450
