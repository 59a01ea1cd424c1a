"""What a scaler did, kept on the device and read when asked; and the events that plugins are told."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..plugins.events import ScaleEvent
from .kernels import flat

__all__ = ["History", "ScaleEvent", "ScaleRecord", "StepResult"]

LEAST_ROWS = 64
"""Kept whatever the history's size: they also tell of skips that the host hasn't seen."""


@dataclass(frozen=True, slots=True)
class ScaleRecord:
    """One update of a scaler.

    Attributes:
        step: Its number, from 1.
        scale: The scale that its losses were multiplied by.
        skipped: Whether an optimizer's gradients had an inf or NaN, so that its step was skipped.
    """

    step: int
    scale: float
    skipped: bool


class StepResult:
    """What became of one step of an optimizer. The values stay on the device until one of them is asked for."""

    def __init__(
        self, step: int, found_inf: Tensor, scale: Tensor, tell: Callable[[StepResult], None] | None = None
    ) -> None:
        self.step = step
        """The number of the scaler's update that the step belongs to, from 1."""
        self._found_inf = found_inf
        self._scale: Tensor | float = scale
        self._skipped: bool | None = None
        self._tell = tell

    @property
    def is_read(self) -> bool:
        """Whether the host knows if the step was skipped."""
        return self._skipped is not None

    @property
    def skipped(self) -> bool:
        """Whether the step was skipped because of an inf or NaN; waits for the device the first time."""
        if self._skipped is None:
            if self._tell is not None and isinstance(self._scale, Tensor):  # one read for both
                found_inf, self._scale = torch.stack((self._found_inf, flat(self._scale))).tolist()
                self._skipped = found_inf > 0
            else:
                self._skipped = _number(self._found_inf) > 0
            if self._tell is not None:
                self._tell(self)
        return self._skipped

    @property
    def scale(self) -> float:
        """The scale that the step's losses were multiplied by; waits for the device."""
        if isinstance(self._scale, Tensor):
            self._scale = _number(self._scale)
        return self._scale

    def keep_scale(self, scale: Tensor) -> None:
        """Hold a copy of the scale instead of the scaler's own, which is about to change."""
        if isinstance(self._scale, Tensor):
            self._scale = scale

    def __repr__(self) -> str:
        outcome = "not read yet" if self._skipped is None else f"skipped={self._skipped}"
        return f"StepResult(step={self.step}, {outcome})"


class History:
    """The last (scale, found_inf) pairs, on the device.

    Adding a row shifts the others. No index is needed that the host would have to know, so rows are kept also where
    the update is part of a graph that is replayed.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.count = 0
        """The rows added, as far as the host knows: replays of a graph add rows without it."""
        self._rows: Tensor | None = None
        self._saved: list[float] | None = None

    def place(self, device: torch.device) -> None:
        """Put the rows on a device, if they aren't there."""
        if self._rows is None or self._rows.device != device:
            self._rows = torch.tensor(self._content(), dtype=torch.float32, device=device)

    def push(self, scale: Tensor, found_inf: Tensor, *, in_place: bool) -> Tensor:
        """Add a row; return all rows, as one flat tensor that later calls don't change unless they are in place."""
        self.place(scale.device)
        assert self._rows is not None
        rows = torch.cat((self._rows[2:], scale.reshape(1), found_inf.reshape(1)))
        if in_place:
            self._rows.copy_(rows)
        else:
            self._rows = rows
        self.count += 1
        return self._rows

    def records(self) -> list[ScaleRecord]:
        """Return the rows that there are, oldest first; waits for the device."""
        rows = self._content()
        pairs = [(s, f) for s, f in zip(rows[::2], rows[1::2], strict=True) if not math.isnan(s)]
        first = max(self.count, len(pairs)) - len(pairs) + 1
        records = [ScaleRecord(first + i, scale, found > 0) for i, (scale, found) in enumerate(pairs)]
        return records[len(records) - min(self.size, len(records)) :]

    def _content(self) -> list[float]:
        if self._rows is not None:
            return self._rows.tolist()
        return self._saved if self._saved is not None else [math.nan] * (2 * max(self.size, LEAST_ROWS))

    def __getstate__(self) -> dict[str, Any]:
        return {"size": self.size, "count": self.count, "_rows": None, "_saved": self._content()}


def _number(tensor: Tensor) -> float:
    value: Any = flat(tensor).tolist()  # unlike item(), no op
    return float(value)
