"""What hooks are told of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["ReportSections", "ScaleEvent", "ScalerArguments"]


class ScalerArguments(Protocol):
    """What ``mpamp_make_scaler`` is given: ``mpamp.ScalerConfig``."""

    @property
    def device(self) -> Any:
        """The device type."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``torch.amp.GradScaler``, checked."""


@dataclass(frozen=True, slots=True)
class ScaleEvent:
    """One step of one optimizer, as ``mpamp_scale_event`` is told of it.

    Attributes:
        step: The number of the scaler's update that the step belongs to, from 1.
        scale: The scale that its losses were multiplied by.
        skipped: Whether the step was skipped.
        optimizer: Whose step it was.
    """

    step: int
    scale: float
    skipped: bool
    optimizer: torch.optim.Optimizer


class ReportSections(Protocol):
    """What ``mpamp_report_sections`` is given: the report of a run."""

    def add_section(self, title: str, *parts: Any) -> None:
        """Add a section: text, rows whose first one is the headings, or objects with a ``_repr_html_``."""

    def to_dict(self) -> dict[str, Any]:
        """Return what the report holds, as values that JSON has."""
