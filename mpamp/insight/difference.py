"""What changed between two traces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .records import OpUse, short_name

__all__ = ["Change", "TraceDiff", "diff"]


@dataclass(frozen=True, slots=True)
class _Side:
    """All uses of one op in one module, in one of the traces."""

    policies: tuple[str, ...]
    dtypes_out: tuple[str, ...]
    calls: int
    casts: int
    cast_bytes: int

    def __str__(self) -> str:
        policies = "/".join(policy or "not listed" for policy in self.policies)
        return f"{policies} -> {'/'.join(self.dtypes_out)}, {self.calls} calls, {self.casts} casts"


_NONE = _Side((), (), 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Change:
    """One op in one module that the two traces differ on."""

    module: str
    op: str
    before: _Side
    after: _Side

    def __str__(self) -> str:
        place = f"{self.module or '(outside of modules)'}: {short_name(self.op)}"
        if self.before == _NONE:
            return f"{place}: only after: {self.after}"
        return (
            f"{place}: only before: {self.before}" if self.after == _NONE else f"{place}: {self.before} => {self.after}"
        )


@dataclass(frozen=True, slots=True)
class TraceDiff:
    """What the second of two traces has otherwise than the first."""

    changes: tuple[Change, ...]
    casts: int
    """How many more casts the second has; less than none if it has fewer."""
    cast_bytes: int

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __str__(self) -> str:
        head = f"{len(self.changes)} differences, {self.casts:+} casts, {self.cast_bytes:+} bytes cast"
        return "\n".join([head, *(f"  {change}" for change in self.changes)])

    def to_dict(self) -> dict[str, Any]:
        """Return the differences as values that JSON has."""
        changes = [
            {"module": c.module, "op": c.op, "before": _values(c.before), "after": _values(c.after)}
            for c in self.changes
        ]
        return {"casts": self.casts, "cast_bytes": self.cast_bytes, "changes": changes}


def diff(before: Iterable[OpUse], after: Iterable[OpUse]) -> TraceDiff:
    """Return on which ops, in which modules, the uses of one trace differ from another's; time isn't compared."""
    left, right = _sides(before), _sides(after)
    places = list(dict.fromkeys([*left, *right]))
    pairs = [(place, left.get(place, _NONE), right.get(place, _NONE)) for place in places]
    changes = tuple([Change(*place, a, b) for place, a, b in pairs if a != b])
    return TraceDiff(
        changes, sum(b.casts - a.casts for _, a, b in pairs), sum(b.cast_bytes - a.cast_bytes for _, a, b in pairs)
    )


def _sides(uses: Iterable[OpUse]) -> dict[tuple[str, str], _Side]:
    groups: dict[tuple[str, str], list[OpUse]] = {}
    for use in uses:
        if use.phase != "compiled":
            groups.setdefault((use.module, use.op), []).append(use)
    return {place: _side(group) for place, group in groups.items()}


def _side(group: list[OpUse]) -> _Side:
    policies = tuple(sorted({use.policy for use in group}))
    dtypes = tuple(sorted({dtype for use in group for dtype in use.dtypes_out}))
    sums = (sum(getattr(use, name) for use in group) for name in ("calls", "casts", "cast_bytes"))
    return _Side(policies, dtypes, *sums)


def _values(side: _Side) -> dict[str, Any]:
    found = {name: getattr(side, name) for name in side.__slots__}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
