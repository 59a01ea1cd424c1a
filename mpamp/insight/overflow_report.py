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
        rule: What to give ``ops=``: rules for ops with which the step was run and had no inf or NaN; of a loop's step,
            with which the call alone had none. Empty where none was found to help.
        advice: In words.
        fitting_scale: The largest power of two as a loss scale with which the backward pass ran without an inf or NaN
            in a gradient; None where none was found, or where it couldn't be run again.
        module_rules: What to give ``mpamp.module_rules``, with which the step was run and had no inf or NaN; or empty.
        reason: What is wrong with its inputs, as far as that is known.
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
    module_rules: dict[str, str] = field(default_factory=dict)
    reason: str = ""

    @property
    def in_float32(self) -> bool:
        """Whether it ran in float32 or wider."""
        return all(t.dtype.itemsize >= 4 for t in (*self.inputs, *self.outputs) if t.dtype.is_floating_point)

    def __str__(self) -> str:
        if self.kernel == "no call":
            return "\n".join([self.op, *(f"  in   {tensor}" for tensor in self.inputs), f"  {self.advice}"])
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
        share: The norm of what its gradient lacks, over that of the gradient as it would be: 0.1 is a tenth off.
            Exact zeros and rounding are no underflow.
        op: Where most of that was lost: what that call is the derivative of.
        module: That op's.
        scale: The loss scale of the step; 1 without a scaler.
        rule: The op's, for ``ops=``: it has it run in float32.
        scale_to_keep: The least power of two with which the backward pass was run again and lost of no parameter more
            than was asked for, those aside that no scale keeps; None if it is one of these, or nothing was run again.
        largest_scale: The largest power of two with which it ran without an inf or NaN; None as above.
    """

    parameter: str
    share: float
    op: str
    module: str | None
    scale: float
    rule: dict[str, str]
    scale_to_keep: float | None = None
    largest_scale: float | None = None

    def __str__(self) -> str:
        where = f"{self.op} in {self.module}" if self.module else self.op
        found = (
            f"{self.parameter}: {self.share:.1%} lost, most of it at {where} with a loss scale of {plain(self.scale)}"
        )
        return f"{found}; {self.advice}"

    @property
    def advice(self) -> str:
        """What to do, in words: numbers are of scales that were run."""
        if self.scale_to_keep is not None:
            return f"{plain(self.scale_to_keep)} keeps it"
        if self.largest_scale is not None:
            return f"no scale keeps it ({plain(self.largest_scale)} is the most that fits): try bfloat16"
        return "a larger scale may keep it"


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
        >>> plain(2.0**24), plain(2.0**-3), plain(1.5)
        ('16777216', '0.125', '1.5')
    """
    return f"{scale:.0f}" if 1 <= scale < 1e12 and scale.is_integer() else f"{scale:g}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
