"""What a scaler did, kept on the device and read when asked; and the events that plugins are told."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["History", "ScaleEvent", "ScaleRecord", "StepResult"]


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


class StepResult:
    """What became of one step of an optimizer. The values stay on the device until one of them is asked for."""

    def __init__(self, step: int, values: Tensor, tell: Callable[[StepResult], None] | None = None) -> None:
        self.step = step
        """The number of the scaler's update that the step belongs to, from 1."""
        self._values: Tensor | None = values
        self._read: tuple[bool, float] = (False, math.nan)
        self._tell = tell

    @property
    def is_read(self) -> bool:
        """Whether the host has the values."""
        return self._values is None

    def read(self) -> tuple[bool, float]:
        """Return (skipped, scale); waits for the device the first time."""
        if self._values is not None:
            found_inf, scale = self._values.tolist()
            self._read, self._values = (found_inf > 0, scale), None
            if self._tell is not None:
                self._tell(self)
        return self._read

    @property
    def skipped(self) -> bool:
        """Whether the step was skipped because of an inf or NaN."""
        return self.read()[0]

    @property
    def scale(self) -> float:
        """The scale that the step's losses were multiplied by."""
        return self.read()[1]

    def __repr__(self) -> str:
        if not self.is_read:
            return f"StepResult(step={self.step}, not read yet)"
        return f"StepResult(step={self.step}, skipped={self.skipped}, scale={self.scale:g})"


class History:
    """A ring of (scale, found_inf) on the device.

    Adding a row shifts the others: there is no index that the host would have to know, so rows are also kept when
    the update is part of a CUDA graph.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._rows: Tensor | None = None
        self._count: Tensor | None = None
        self._saved: tuple[list[float], int] | None = None

    def place(self, device: torch.device) -> None:
        """Put the ring on a device, if it isn't there."""
        if self.size and (self._rows is None or self._rows.device != device):
            rows, count = self._content()
            self._rows = torch.tensor(rows, dtype=torch.float32, device=device)
            self._count = torch.tensor(count, dtype=torch.int32, device=device)

    def push(self, scale: Tensor, found_inf: Tensor) -> None:
        """Add a row; ``scale`` and ``found_inf`` are copied."""
        if not self.size:
            return
        self.place(scale.device)
        assert self._rows is not None
        assert self._count is not None
        self._rows.copy_(torch.cat((self._rows[2:], scale.reshape(1), found_inf.reshape(1))))
        self._count.add_(1)

    def records(self) -> list[ScaleRecord]:
        """Return the rows that there are, oldest first; waits for the device."""
        rows, count = self._content()
        pairs = [(s, f) for s, f in zip(rows[::2], rows[1::2], strict=True) if not math.isnan(s)]
        first = count - len(pairs) + 1
        return [ScaleRecord(first + i, scale, found > 0) for i, (scale, found) in enumerate(pairs)]

    def _content(self) -> tuple[list[float], int]:
        if self._rows is not None and self._count is not None:
            return self._rows.tolist(), int(self._count)
        return self._saved if self._saved is not None else ([math.nan] * (2 * self.size), 0)

    def __getstate__(self) -> dict[str, Any]:
        return {"size": self.size, "_rows": None, "_count": None, "_saved": self._content()}
