"""The report: what a script did in mixed precision, as values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..records import Summary, use_to_dict
from ..tracing import TORCH_REGIONS
from .scaling import ScaleLog
from .steps import Steps
from .training import Training

__all__ = ["Advice", "Comparison", "Html", "Outcome", "Report", "Section", "Table"]

How = Literal["finished", "raised", "exited", "interrupted"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the script ended."""

    how: How
    text: str = ""
    """What it raised, or its exit code, in a line."""
    trace: str = ""
    """The traceback, where it raised."""

    @property
    def is_well(self) -> bool:
        """Whether it ran to its end."""
        return self.how == "finished" or (self.how == "exited" and self.text == "0")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The script run again, nobody looking, as it is and with autocast off; what ``Clock.to_dict`` gave."""

    other: str
    """What it is compared with: ``float32``."""
    mixed: dict[str, Any] | None = None
    plain: dict[str, Any] | None = None
    problem: str = ""
    """Why there are no numbers."""

    @property
    def ratio(self) -> float | None:
        """The time of a step in mixed precision over that with autocast off: below 1 is faster; None if unknown."""
        if self.mixed is None or self.plain is None:
            return None
        name = "step_ms" if self.mixed["step_ms"] and self.plain["step_ms"] else "seconds"
        return float(self.mixed[name] / self.plain[name]) if self.plain[name] else None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under headings, in a section."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Html:
    """A piece of a page, as its maker wrote it."""

    text: str


@dataclass(frozen=True, slots=True)
class Section:
    """What a plugin, or the script itself, adds."""

    title: str
    parts: tuple[Any, ...]
    """Text, a ``Table`` or ``Html``."""
    by: str = ""
    """The plugin's name."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to do.

    Attributes:
        rank: 0 for what makes results wrong, 1 for steps or gradients that are lost, 2 for time, 3 for the rest.
        worth: Within its rank: the share of steps, gradients or time that it is about, from 0 to 1.
        title: What is the matter.
        why: What was seen, in numbers.
        do: What to do, in words or code.
    """

    rank: int
    worth: float
    title: str
    why: str
    do: str


@dataclass(slots=True)
class Report:
    """All that is to be said about one run.

    Attributes:
        script: What ran, with its arguments.
        outcome: How it ended.
        clock: Seconds, steps, ms a step and memory, while it was looked at.
        machine: Versions, devices and the engine.
        tables: The op table of each device in use, and the rows that aren't shipped ones.
        summary: What the trace saw.
        scalers: Each scaler's history.
        steps: What the steps that were looked at op by op gave.
        training: What of the script goes against mixed precision.
        comparison: Beside float32; None where that wasn't asked for.
        torch_regions: Entered regions of ``torch.autocast``, which the trace doesn't see.
        half_models: Models whose weights are in lower precision themselves.
        advice: The weightiest first.
        sections: Others'.
        left_out: Plugins whose sections failed, a line each.
    """

    script: str
    outcome: Outcome
    clock: dict[str, Any]
    machine: dict[str, Any]
    tables: list[dict[str, Any]]
    summary: Summary
    scalers: list[ScaleLog]
    steps: Steps
    training: Training = field(default_factory=Training)
    torch_regions: int = 0
    half_models: tuple[str, ...] = ()
    comparison: Comparison | None = None
    advice: list[Advice] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add_section(self, title: str, *parts: Any) -> None:
        """Add a section at the end.

        Args:
            title: Its heading.
            parts: Each a str, which becomes a paragraph; a sequence of sequences, a table whose first row is its
                headings; or an object with a ``_repr_html_`` that needs no other file, which is taken as it is.

        Raises:
            TypeError: A part is none of these.
        """
        self.sections.append(Section(str(title), tuple(map(_part, parts))))

    @property
    def skipped(self) -> int:
        """Steps that a scaler skipped."""
        return sum(log.skipped for log in self.scalers)

    @property
    def start_up(self) -> int:
        """Those of them by which scalers found their first scale: no fault."""
        return sum(log.start_up for log in self.scalers if log.has_trained)

    def is_start_up(self, place: tuple[str, ...]) -> bool:
        """Tell whether all that overflowed at a place, a key of the steps' overflows, did so in such a skip."""
        found, count = self.steps.overflows[place]
        logs = [log for log in self.scalers if log.has_trained]
        skips = [skip.overflow for log in logs for skip in log.skips[: log.start_up] if skip.overflow is not None]
        same = [one for one in skips if (one.op, one.module, one.phase) == (found.op, found.module, found.phase)]
        return found.phase == "backward" and len(same) == count.steps

    @property
    def has_overflow_faults(self) -> bool:
        """Whether something overflowed that a scaler's search for its first scale doesn't explain."""
        return not all(map(self.is_start_up, self.steps.overflows))

    @property
    def unseen(self) -> tuple[str, ...]:
        """What this report can't say."""
        lines = [line for line in self.summary.unseen if line != TORCH_REGIONS]
        if self.torch_regions:
            lines.append(f"What was cast in {self.torch_regions} regions of torch.autocast that aren't mpamp's.")
        return (*lines, *_unseen_steps(self.steps))

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as values that JSON has."""
        totals = {name: self.summary.total(name) for name in ("calls", "casts", "kept_used", "cast_bytes")}
        return {
            "script": self.script,
            "outcome": {"how": self.outcome.how, "text": self.outcome.text},
            "clock": self.clock,
            "machine": self.machine,
            "tables": self.tables,
            "totals": totals,
            "uses": [use_to_dict(use) for use in self.summary.uses],
            "findings": [finding.to_dict() for finding in self.summary.findings],
            "scalers": [
                {"kind": log.kind, "attempts": log.attempts, "skipped": log.skipped, "scales": log.points}
                for log in self.scalers
            ],
            "advice": [{"title": one.title, "why": one.why, "do": one.do} for one in self.advice],
            "unseen": list(self.unseen),
        }


def _part(part: Any) -> Any:
    if isinstance(part, str):
        return part
    if hasattr(part, "_repr_html_"):
        text = part._repr_html_()
        if isinstance(text, str):
            return Html(text)
    if isinstance(part, Sequence) and part and all(_is_row(row) for row in part):
        headings, *rows = (tuple(map(str, row)) for row in part)
        return Table(headings, tuple(rows))
    raise TypeError(f"a part of a section is a str, rows or an object with _repr_html_, got {part!r}.")


def _is_row(row: Any) -> bool:
    return isinstance(row, Iterable) and not isinstance(row, str | bytes)


def _unseen_steps(steps: Steps) -> list[str]:
    if not steps.watched:
        why = steps.why_not or "no model was called in mixed precision."
        return [f"Overflow and underflow: no step was looked at, for {why}"]
    kind = "steps" if steps.trains else "calls"
    found = [f"Overflow and underflow were looked for in {steps.watched} {kind} of {steps.model}, and in no others."]
    if steps.others:
        found.append(f"Of {', '.join(steps.others)}, called as well, no steps were looked at.")
    if steps.why_not:
        found.append(steps.why_not)
    return found
