"""What a trace holds: how each op was used at each place, and what is worth a look."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from ..engine import Call, Cast

__all__ = [
    "CAST",
    "Fault",
    "Faulty",
    "Finding",
    "OpUse",
    "Phase",
    "Summary",
    "TINY",
    "bytes_of",
    "name_of",
    "results_of",
    "short_name",
    "use_to_dict",
]

Phase = Literal["forward", "backward", "compiled"]


@dataclass(frozen=True, slots=True)
class OpUse:
    """All calls of one op in one module that had the same dtypes and the same rule."""

    op: str
    module: str
    """Its name in the outermost module; empty outside of every module."""
    phase: Phase
    """``backward`` is what ran in a backward pass, recomputes among it; ``compiled``, what a compiler traced."""
    device: str
    region: str
    """The region's dtype."""
    policy: str
    """Empty where the table doesn't list the op."""
    rule: str
    """Who decided: a table that ships with mpamp, a plugin, ``user``, ``registered`` or ``region``; empty for none."""
    dtypes_in: tuple[str, ...]
    """Of the tensors that the op was called with."""
    dtypes_out: tuple[str, ...]
    calls: int
    casts: int
    """Arguments that were cast; those of weights whose casts are kept from then on are among them."""
    kept_used: int
    """Arguments that a kept cast stood in for."""
    cast_bytes: int
    """Bytes read and written by the casts."""
    host_us: float
    """What the host was busy with the calls, in microseconds, casts included; on a CPU that is the work itself."""
    cast_us: float


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that costs time or accuracy, and what would change it."""

    kind: str
    op: str
    modules: tuple[str, ...]
    text: str
    advice: str
    ops: dict[str, str]
    """The ``ops=`` of a region that would change it; empty where no rule of an op can."""
    calls: int
    cast_bytes: int
    is_shipped: bool = False
    """Whether it follows from a rule of a table that ships with mpamp, which has its reasons."""
    module_rules: dict[str, Any] = field(default_factory=dict)
    """What to give ``mpamp.module_rules`` instead of ``ops``, where other modules use the op as they should."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.text} {self.advice}"

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as values that JSON has."""
        return {name: _plain(getattr(self, name)) for name in self.__slots__}


class Fault(NamedTuple):
    """What is wrong with a call; the same fault in several modules is one finding."""

    kind: str
    op: str
    text: str
    advice: str
    rule: tuple[str, str] | None = None
    """The op and the policy that would change it."""
    is_shipped: bool = False


CAST = "aten::_to_copy"
"""What a cast is that code asks for, as ``x.float()``."""
TINY = 2048
"""Elements of all the arguments of an op together, up to which a cast takes longer than the op gains."""
Faulty = list[tuple[Fault, int]]
"""The faults of a call, and the bytes that casts moved for each."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What a trace saw up to a moment."""

    uses: tuple[OpUse, ...]
    findings: tuple[Finding, ...]
    unseen: tuple[str, ...]
    by_design: tuple[Finding, ...] = ()
    """What the tables that ship with mpamp ask for."""

    def total(self, name: str) -> int:
        """Return the sum of a column, over what ran: compiled programs are only listed."""
        return sum(getattr(use, name) for use in self.uses if use.phase != "compiled")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def use_to_dict(use: OpUse) -> dict[str, Any]:
    """Return how an op was used as values that JSON has."""
    return {name: _plain(getattr(use, name)) for name in use.__slots__}


def short_name(op: str) -> str:
    """Return an op's name as ``ops=`` takes it.

    Example:
        >>> short_name("aten::mul.Tensor"), short_name("mylib::fru")
        ('mul', 'mylib::fru')
    """
    return op.removeprefix("aten::").partition(".")[0]


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def bytes_of(cast: Cast) -> int:
    """Return how many bytes a cast reads and writes."""
    return int(cast.before.numel()) * (cast.before.dtype.itemsize + cast.after.dtype.itemsize)


def results_of(call: Call) -> list[torch.Tensor]:
    """Return the tensors that a call gave back."""
    result = call.result
    if isinstance(result, torch.Tensor):
        return [result]
    flat = [t for r in result for t in (r if isinstance(r, list | tuple) else (r,))] if _is_many(result) else []
    return [t for t in flat if isinstance(t, torch.Tensor)]


def _is_many(result: Any) -> bool:
    return isinstance(result, list | tuple)
