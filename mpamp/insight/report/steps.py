"""Some steps of a script looked at op by op: what overflowed, what became zero, and whose skip it was."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import MpampError
from ..overflow import OverflowFinder
from ..overflow_report import Overflow, StepReport, Underflow

__all__ = ["LEAST_SHARE", "StepWatch", "Steps"]

Module = torch.nn.Module
LEAST_SHARE = 0.1
"""Gradients that are off by so much are named."""
_MOST = 200
"""Overflows and underflows that are told apart."""


@dataclass(slots=True)
class _Count:
    steps: int
    first: int


@dataclass(slots=True)
class Steps:
    """What was found in the steps that were looked at."""

    model: str = ""
    """Whose steps; empty where none was looked at."""
    trains: bool = False
    watched: int = 0
    why_not: str = ""
    """Why there are no steps, or no more of them."""
    others: dict[str, None] = field(default_factory=dict)
    """Other models that were called."""
    overflows: dict[tuple[str, ...], tuple[Overflow, _Count]] = field(default_factory=dict)
    underflows: dict[str, tuple[Underflow, _Count]] = field(default_factory=dict)

    @property
    def overflowed(self) -> int:
        """Steps that had an overflow."""
        return sum(count.steps for _, count in self.overflows.values())

    def take(self, report: StepReport) -> None:
        """Add a step up."""
        self.watched += 1
        found = report.overflow
        if found is not None and len(self.overflows) < _MOST:
            key = (found.op, found.module or "", found.phase)
            kept, count = self.overflows.get(key, (found, _Count(0, self.watched)))
            count.steps += 1
            self.overflows[key] = (kept, count)
        for lost in report.underflows[:_MOST]:
            worst, count = self.underflows.get(lost.parameter, (lost, _Count(0, self.watched)))
            count.steps += 1
            self.underflows[lost.parameter] = (lost if lost.share > worst.share else worst, count)


class StepWatch:
    """Looks at the first steps of the first model that trains, and at steps that follow a skipped one.

    A step is a forward pass of the model and the backward passes after it, up to the optimizer's step.

    Args:
        limit: How many of the first steps, and of those after a skip; 0 looks at none.
        is_mixed: Tells of a model that is about to run whether mixed precision has to do with it.
        label: Tells what a model is called.
    """

    def __init__(self, limit: int, is_mixed: Callable[[Module], bool], label: Callable[[Module], str]) -> None:
        self.found = Steps()
        self._scaler: Any = None
        self._is_mixed, self._label = is_mixed, label
        self._limit = self._left = self._after_skips = limit
        self._thread = threading.get_ident()
        self._finder: OverflowFinder | None = None
        self._dirty: StepReport | None = None

    def scaled_by(self, scaler: Any) -> None:
        """A loss is about to be scaled: the next backward pass has this scaler's scale."""
        self._scaler = scaler
        if self._finder is not None:
            self._finder.scaler = scaler

    def begin(self, root: Module) -> None:
        """A model is about to run."""
        if threading.get_ident() != self._thread or not self._limit:
            return
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in root.parameters())
        if (self._finder is None or (trains and not self.found.trains)) and self._suits(root):
            self.close()
            self._finder = OverflowFinder(root, self._scaler, LEAST_SHARE)
            self._finder.give_way = self.end
            self.found.model, self.found.trains, self._left = self._label(root), trains, self._limit
        finder = self._finder
        if finder is None:
            return
        if root is not finder.model:
            self.found.others[self._label(root)] = None
            return
        if self._is_open() and trains and not finder.has_gradients:
            return  # one step has several passes
        self.end()
        if trains is self.found.trains and self._left > 0:
            self._open(finder)

    def _suits(self, root: Module) -> bool:
        if any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in root.modules()):
            self.found.why_not = f"{self._label(root)} is compiled: steps of compiled code aren't looked into."
            return False
        return self._is_mixed(root)

    def _is_open(self) -> bool:
        return self._finder is not None and self._finder.is_open

    def _open(self, finder: OverflowFinder) -> None:
        try:
            finder.begin_inside()
        except MpampError as error:  # the script watches calls itself
            self.found.why_not = f"steps weren't looked at while the script did so itself: {error}"
        else:
            self._left -= 1

    def end(self) -> None:
        """The step, if one is looked at, is over: an optimizer is about to step, or may be about to."""
        finder = self._finder
        if finder is None or not finder.is_open or threading.get_ident() != self._thread:
            return
        try:
            report = finder.read()
        finally:
            finder.__exit__(None, None, None)
        if report is not None:
            self.found.take(report)
            if self._dirty is None and not report.is_clean:
                self._dirty = report

    def attempted(self, skipped: bool) -> StepReport | None:
        """A scaler has stepped or skipped; return the first step since the last time in which something was wrong."""
        dirty, self._dirty = self._dirty, None
        if skipped and self._left == 0 and self._after_skips > 0:
            self._left, self._after_skips = 1, self._after_skips - 1
        return dirty if skipped else None

    def close(self) -> None:
        """Look at no more; the model may go."""
        self.end()
        self._finder = None
