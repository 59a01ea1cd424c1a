"""What helps against an overflow, found by running the step with it: what isn't seen to help isn't advised."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch

from .overflow_causes import Culprit
from .overflow_inputs import reason_by_values
from .overflow_report import Overflow
from .repeated_step import Change, RepeatedStep

__all__ = ["Watched", "with_advice"]

_MOST_RULES = 4
"""Rules that are advised together, and inputs' makers that are tried."""
_UNKNOWN = "running the step again failed, so that no rule was tried"


class Watched(NamedTuple):
    """What came of a step that was watched."""

    overflow: Overflow | None
    culprit: Culprit | None
    arguments: dict[str, object] | None = None
    """Of the call that was to be kept."""


Watch = Callable[[RepeatedStep, Change, Culprit | None], Watched]
"""Runs a step and watches it; keeps the arguments of a call."""


def with_advice(found: Watched, step: RepeatedStep, watch: Watch, *, is_compiled: bool) -> Overflow:
    """Return an overflow with what helps against it.

    Args:
        found: It, and the call that made it, if one did.
        step: Runs the step again.
        watch: Does so watched.
        is_compiled: Whether compiled code ran, which isn't seen into.
    """
    assert found.overflow is not None
    trials = _Trials(step, watch)
    try:
        with step.repeated():
            if found.culprit is None and is_compiled:
                return trials.uncompiled(found.overflow)
            return found.overflow if found.culprit is None else trials.advised(found.overflow, found.culprit)
    except Exception as error:  # a step that can't be run twice
        text = f"{_UNKNOWN} ({type(error).__name__})"
        return dataclasses.replace(found.overflow, rule={}, advice=f"{text}; run alone: {found.overflow.advice}")


class _Trials:
    def __init__(self, step: RepeatedStep, watch: Watch) -> None:
        self._step, self._watch, self._is_eager = step, watch, False

    def uncompiled(self, overflow: Overflow) -> Overflow:
        """Look at the step with nothing compiled."""
        self._is_eager = True
        found = self._watch(self._step, Change(is_eager=True), None)
        if found.overflow is None or found.culprit is None:
            return overflow
        advised = self.advised(found.overflow, found.culprit)
        return dataclasses.replace(advised, advice=f"{advised.advice} (seen with torch.compile off)")

    def advised(self, overflow: Overflow, culprit: Culprit) -> Overflow:
        wide = self._outcome(Change(dtype=torch.float32))
        if wide.overflow is not None:
            return self._explained(overflow, culprit, wide)
        ops = self._ops(culprit)
        modules = self._chain(culprit, lambda names: Change(modules=names), lambda found: found.module or None)
        advice = _advice(ops, modules, culprit) or self._in_bfloat16(overflow)
        return dataclasses.replace(overflow, rule=ops, module_rules=modules, advice=advice)

    # -- Where float32 doesn't help --------------------------------------------------------------------

    def _explained(self, overflow: Overflow, culprit: Culprit, wide: Watched) -> Overflow:
        """Say what is wrong with the culprit's inputs, or that something else is wrong too."""
        assert wide.overflow is not None
        same = (wide.overflow.kernel, wide.overflow.module, wide.overflow.phase)
        if same != (overflow.kernel, overflow.module, overflow.phase):
            there = f"{wide.overflow.op}{f' in {wide.overflow.module}' if wide.overflow.module else ''}"
            advice = f"float32 helps here, but not at {there}, {wide.overflow.phase}: {wide.overflow.advice}"
            return dataclasses.replace(overflow, rule={}, advice=advice)
        if not overflow.in_float32 and culprit.rule_op is None:
            return dataclasses.replace(overflow, rule={})
        seen = self._watch(self._step, self._base(Change()), culprit)
        reason = "" if seen.arguments is None else reason_by_values(culprit.kernel, seen.arguments)
        ran = "it ran in float32" if overflow.in_float32 else "float32 gives it too"
        reason = reason or wide.overflow.reason or "look at its inputs and their ranges"
        return dataclasses.replace(overflow, rule={}, advice=f"{ran}, so that no rule helps: {reason}.")

    # -- Where it does ---------------------------------------------------------------------------------

    def _ops(self, culprit: Culprit) -> dict[str, str]:
        """Return the fewest rules for ops that were found to help; empty for none."""
        found = self._chain(culprit, lambda names: Change(ops=names), lambda found: found.rule_op)
        makers = [op for op in culprit.makers if op != culprit.rule_op][:_MOST_RULES]
        tries: list[tuple[str, ...]] = [(maker,) for maker in makers]
        tries += [] if culprit.rule_op is None else [(culprit.rule_op, maker) for maker in makers]
        for names in tries if len(found) != 1 else []:
            rules = dict.fromkeys(names, "fp32")
            if (not found or len(rules) < len(found)) and self._outcome(Change(ops=rules)).overflow is None:
                return rules
        return found

    def _chain(
        self, culprit: Culprit, change: Callable[[dict[str, str]], Change], name_of: Callable[[Culprit], str | None]
    ) -> dict[str, str]:
        """Give the culprit a rule, then what overflows after that, until nothing does; empty if that isn't reached."""
        rules: dict[str, str] = {}
        found: Culprit | None = culprit
        while len(rules) < _MOST_RULES and found is not None:
            name = name_of(found)
            if name is None or name in rules:
                return {}
            rules[name] = "fp32"
            outcome = self._outcome(change(rules))
            if outcome.overflow is None:
                return rules
            found = outcome.culprit
        return {}

    def _in_bfloat16(self, overflow: Overflow) -> str:
        is_half = any(t.dtype is torch.float16 for t in (*overflow.inputs, *overflow.outputs))
        if is_half and self._outcome(Change(dtype=torch.bfloat16)).overflow is None:
            return "no rule of a few ops or modules helps; a region in bfloat16 does."
        return "no rule of a few ops or modules helps; the step in float32 has no inf or NaN."

    def _outcome(self, change: Change) -> Watched:
        change = self._base(change)
        if self._step.run(change):
            return Watched(None, None)
        return self._watch(self._step, change, None)

    def _base(self, change: Change) -> Change:
        return dataclasses.replace(change, is_eager=self._is_eager)


def _advice(ops: dict[str, str], modules: dict[str, str], culprit: Culprit) -> str:
    by_op, by_module = f"ops={ops!r}", f"module_rules(model, {modules!r})"
    if ops and modules and not culprit.elsewhere.isdisjoint(ops):
        return f"{by_module}; {by_op} would be for every module"
    return by_op if ops else by_module if modules else ""
