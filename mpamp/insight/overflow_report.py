"""What an overflow, an underflow and a step with them are, in values and in words."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, field

import torch

from .overflow_measures import Range

__all__ = ["Overflow", "StepReport", "TensorRange", "Underflow", "plain"]

_MOST_SHOWN = 8
"""So many parameters are named in a step's text."""


@dataclass(frozen=True, slots=True)
class TensorRange:
    """An input or an output of a call, and the values that it had."""

    label: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    values: Range

    def __str__(self) -> str:
        return f"{self.label or 'result'}: {_short(self.dtype)} {list(self.shape)}, {self.values}"


@dataclass(frozen=True, slots=True)
class Overflow:
    """The first call of a step that made an inf or NaN which reached the loss, the output or a gradient.

    Attributes:
        op: The op, or the one whose rule cast its arguments.
        kernel: The overload that made it: ``aten::_to_copy`` where it was the cast.
        module: Where, by its name in the model; None outside of it.
        parameter: The parameter that the op takes, if it takes one.
        phase: ``"forward"`` or ``"backward"``.
        inputs: What the call was given.
        outputs: What came out.
        made_by: What made the value that didn't fit, where a cast was too much.
        rule: What to give ``ops=`` to have it run in float32; empty where no rule can help.
        advice: In words.
        fitting_scale: Of an overflow in a backward pass in lower precision: the largest loss scale that fits there.
    """

    op: str
    kernel: str
    module: str | None
    parameter: str | None
    phase: str
    inputs: tuple[TensorRange, ...]
    outputs: tuple[TensorRange, ...]
    made_by: str | None
    rule: dict[str, str]
    advice: str
    fitting_scale: float | None = None

    def __str__(self) -> str:
        where = "outside of the model" if self.module is None else f"in {self.module or 'the model itself'}"
        lines = [f"{self.op} ({self.kernel}) {where}, {self.phase}"]
        lines += [f"  parameter {self.parameter}"] if self.parameter else []
        lines += [f"  in   {tensor}" for tensor in self.inputs]
        lines += [f"  out  {tensor}" for tensor in self.outputs]
        lines += [f"  it came from {self.made_by}"] if self.made_by else []
        return "\n".join([*lines, f"  try: {self.advice}"])


@dataclass(frozen=True, slots=True)
class Underflow:
    """A parameter whose gradient was lost in part, or all of it: values that lower precision made zero.

    Attributes:
        parameter: Its name in the model.
        share: How much of what its gradient is made of became zero on the way, from 0 to 1.
        op: Where most of it did: what that call is the derivative of.
        module: That op's.
        scale: The loss scale of the step; 1 without a scaler.
        scale_to_keep: The least power of two that keeps all that was lost there.
        largest_scale: The largest power of two that overflows nowhere in this backward pass.
        rule: What to give ``ops=`` where no scale can keep it.
    """

    parameter: str
    share: float
    op: str
    module: str | None
    scale: float
    scale_to_keep: float
    largest_scale: float
    rule: dict[str, str]

    def __str__(self) -> str:
        where = f"{self.op} in {self.module}" if self.module else self.op
        found = (
            f"{self.parameter}: {self.share:.1%} lost, most of it at {where} with a loss scale of {plain(self.scale)}; "
        )
        if self.scale_to_keep <= self.largest_scale:
            return found + f"{plain(self.scale_to_keep)} keeps it"
        remedy = f"ops={self.rule!r}" if self.rule else "bfloat16"
        return found + f"no scale keeps all ({plain(self.largest_scale)} is the most that fits): try {remedy}"


@dataclass(frozen=True, slots=True)
class StepReport:
    """What went wrong in one step.

    Attributes:
        step: Its number, from 1: one forward pass and the backward passes after it.
        overflow: The first one, or None.
        parameters: Those whose gradients have an inf or NaN, in the model's order; a scaler skips their step.
        underflows: Parameters whose gradients became zero, the worst first.
        scale: The loss scale; None without a scaler.
        is_skipped_for_others: The scaler lowered its scale after this step, in which nothing overflowed here.
    """

    step: int
    overflow: Overflow | None = None
    parameters: tuple[str, ...] = ()
    underflows: tuple[Underflow, ...] = field(default=())
    scale: float | None = None
    is_skipped_for_others: bool = False

    @property
    def is_clean(self) -> bool:
        """Whether nothing went wrong."""
        return not (self.overflow or self.parameters or self.underflows or self.is_skipped_for_others)

    def __str__(self) -> str:
        scale = "" if self.scale is None else f", loss scale {plain(self.scale)}"
        if self.is_clean:
            return f"step {self.step}{scale}: nothing overflows, and no gradient underflows"
        lines = [f"step {self.step}{scale}"]
        if self.overflow is not None:
            lines += ["first overflow: " + str(self.overflow)]
        if self.parameters:
            names = ", ".join(self.parameters[:_MOST_SHOWN])
            lines += [f"gradients with inf or NaN: {names}{_more(self.parameters)}"]
        if self.is_skipped_for_others:
            lines += [f"the scaler skipped this step, but no op here overflowed: {_whose()}"]
        if self.underflows:
            lines += ["gradients that underflow:", *(f"  {found}" for found in self.underflows[:_MOST_SHOWN])]
            lines += [f" {more}" for more in [_more(self.underflows)] if more]
        return "\n".join(lines)


def _whose() -> str:
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return f"the inf or NaN is another rank's than {dist.get_rank()}, or of a step before that it was added to"
    return "the inf or NaN is of a step before whose gradients were added to, or of what was done to them since"


def _more(found: Sized) -> str:
    return f" and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""


def plain(scale: float) -> str:
    """Return a scale as people write it.

    Example:
        >>> plain(2.0**24), plain(2.0**-3)
        ('16777216', '0.125')
    """
    return f"{scale:.0f}" if 1 <= scale < 1e12 else f"{scale:g}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
