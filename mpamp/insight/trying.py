"""Rules that findings advise, tried on the model: one that casts more, or doesn't mend what it is for, isn't given."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any

from ..engine.scope import THREAD
from ..errors import MpampError
from ..functions.module_rules import module_rules
from .records import Finding, Summary
from .surrounding import with_rules
from .text import size

__all__ = ["forget_casts", "tried"]

_MOST = 8
"""Findings whose rules are tried: each takes two or three runs."""
Rules = dict[str, Any]
Measure = Callable[[contextlib.AbstractContextManager[object]], Summary]


def tried(findings: Collection[Finding], model: Any, measure: Measure, devices: Collection[str]) -> tuple[Finding, ...]:
    """Return findings with the rules that were tried and mend them with fewer bytes cast; without one where none does.

    Args:
        findings: What was found, the weightiest first.
        model: The model.
        measure: Runs the model inside of a context, and returns what was seen.
        devices: The device types that it runs on.
    """
    found = []
    left = _MOST
    before: Summary | None = None
    for finding in findings:
        if finding.ops and left:
            left -= 1
            before = measure(contextlib.nullcontext()) if before is None else before
            finding = _tried(finding, model, measure, devices, before)
        elif finding.ops:
            finding = dataclasses.replace(finding, ops={}, advice=_untried(finding.advice))
        found.append(finding)
    return tuple(found)


def _tried(finding: Finding, model: Any, measure: Measure, devices: Collection[str], before: Summary) -> Finding:
    for is_local, rules in _candidates(finding, model, before):
        try:
            after = measure(module_rules(model, rules) if is_local else with_rules(devices, rules))
        except (MpampError, RuntimeError, TypeError, ValueError):  # no rule may say so, or the model doesn't run by it
            continue
        moved, most = after.total("cast_bytes"), before.total("cast_bytes")
        if moved < most and not _is_there(finding, after):
            do = f"mpamp.module_rules(model, {rules!r})" if is_local else f"ops={rules!r}"
            return dataclasses.replace(
                finding,
                ops={} if is_local else rules,
                module_rules=rules if is_local else {},
                advice=f"{do}: {size(most)} of casts become {size(moved)} (tried).",
            )
    advice = f"{_untried(finding.advice)} No rule that was tried mends it with fewer bytes cast.".strip()
    return dataclasses.replace(finding, ops={}, advice=advice)


def _candidates(finding: Finding, model: Any, seen: Summary) -> Iterator[tuple[bool, Rules]]:
    """Yield rules for the op in the modules that the finding is about, and everywhere: first what changes no others."""
    names = {name or type(model).__name__: name for name, _ in model.named_modules()}
    users = {use.module for use in seen.uses if use.op == finding.op}
    everywhere = (False, dict(finding.ops))
    if not all(module in names for module in finding.modules):
        yield everywhere
        return
    local = (True, {names[module]: dict(finding.ops) for module in finding.modules})
    yield from (local, everywhere) if users - set(finding.modules) else (everywhere, local)


def _is_there(finding: Finding, seen: Summary) -> bool:
    """Tell whether what was found is there still, in one of its modules."""
    same = [f for f in (*seen.findings, *seen.by_design) if (f.kind, f.op) == (finding.kind, finding.op)]
    return any(set(f.modules) & set(finding.modules) for f in same)


def _untried(advice: str) -> str:
    """Return advice without the rule that it begins with: what else may be done."""
    return advice.partition("; or ")[2].capitalize() if advice.startswith("ops=") else advice


def forget_casts() -> None:
    """Drop the casts that this thread's regions keep: each run is to make its own."""
    THREAD.state.casts.clear()
