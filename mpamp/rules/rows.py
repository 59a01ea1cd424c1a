"""Row: what one op does in a region; and how rules, as people write them, become rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import OpTableError, UnknownOpError, UnknownPolicyError, nearest
from .eligibility import find_overload, full_name, is_in_place, resolve
from .policy import CASTABLE, CastPolicy
from .shipped import LISTS

__all__ = ["APPEND_DTYPE", "FAMILY_SIGN", "Row", "check_row", "parse_dtype", "parse_rules", "shown"]

FAMILY_SIGN = "@"
"""What a rule's name begins with where it means a whole family of ``oplists/families.toml``."""
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_DTYPES |= {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_NAME = re.compile(r"(?:\w{1,99}::)?\w{1,200}(?:\.\w{1,99})?", flags=re.ASCII)


def parse_dtype(name: torch.dtype | str, error: type[Exception] = OpTableError) -> torch.dtype:
    """Return the dtype called ``name``, with or without ``torch.``; bf16, fp16 and fp32 are names too.

    Raises:
        OpTableError: torch has no dtype of that name; or another ``error``.

    Example:
        >>> parse_dtype("bfloat16"), parse_dtype("torch.float16"), parse_dtype("bf16")
        (torch.bfloat16, torch.float16, torch.bfloat16)
    """
    if isinstance(name, torch.dtype):
        return name
    found = _DTYPES.get(str(name).removeprefix("torch."))
    if found is None:
        raise error(f"unknown dtype {shown(name)}: write one of torch's names, such as 'bfloat16' or 'float16'.")
    return found


def shown(value: object, width: int = 80) -> str:
    """Return a value as a message shows it: what a file holds may be of any length.

    Example:
        >>> shown("softmax"), len(shown("softmax" * 1000))
        ("'softmax'", 80)
    """
    text = repr(value)
    return text if len(text) <= width else f"{text[: width - 3]}..."


@dataclass(frozen=True, slots=True)
class Row:
    """One op's policy, by the region's dtype where it depends on that, and who decided it."""

    policy: CastPolicy | None
    by_dtype: tuple[tuple[torch.dtype, CastPolicy], ...] = ()
    source: str = field(default="user", compare=False)

    def __post_init__(self) -> None:
        # Nothing of the caller's is kept that could change later.
        policy = None if self.policy is None else CastPolicy.parse(self.policy)
        cells = {parse_dtype(dtype): CastPolicy.parse(policy) for dtype, policy in self.by_dtype}
        object.__setattr__(self, "policy", policy)
        object.__setattr__(self, "by_dtype", tuple(sorted(cells.items(), key=lambda cell: str(cell[0]))))
        object.__setattr__(self, "source", str(self.source))

    def at(self, dtype: torch.dtype | None) -> CastPolicy | None:
        """Return the policy in a region of ``dtype``; None means that the op is not listed there."""
        for known, policy in self.by_dtype:
            if known is dtype:
                return policy
        return self.policy

    def over(self, base: Row | None) -> Row:
        """Return this row on top of ``base``, which still decides the dtypes that this one leaves open."""
        if base is None or self.policy is not None:
            return self
        return Row(base.policy, (*base.by_dtype, *self.by_dtype), self.source)

    def policies(self) -> set[CastPolicy]:
        """Return every policy that this row can give."""
        return {p for p in (self.policy, *(p for _, p in self.by_dtype)) if p is not None}

    def __str__(self) -> str:
        parts = [f"{str(d).removeprefix('torch.')}: {p}" for d, p in self.by_dtype]
        if not parts:
            return str(self.policy)
        return "{" + ", ".join([*parts, f"else: {self.policy}"]) + "}"


# -- Rules to rows -------------------------------------------------------------------------------------


def parse_rules(rules: Mapping[str, Any], source: str, *, is_foreign: bool = False) -> dict[str, Row]:
    """Return the rows that rules mean, by overload; of two names for one overload, the more exact one decides.

    Args:
        rules: Op names, or families' with ``@`` before them, to policies.
        source: Who decides them.
        is_foreign: Whether exact names that this torch lacks are kept.

    Raises:
        OpTableError: A rule is wrong, or two contradict each other.
    """
    if not isinstance(rules, Mapping):
        raise OpTableError(f"rules are a mapping from op to policy, got {type(rules).__name__}.")
    rows: dict[str, Row] = {}
    decided: dict[str, str] = {}
    for op in rules:
        if not isinstance(op, str):
            raise UnknownOpError(f"an op is named by a string such as 'softmax', got {shown(op)}.")
    for op, spec in sorted(rules.items(), key=lambda rule: _exactness(rule[0])):
        row = _parse_row(op, spec, source)
        for overload in _overloads(op, is_foreign):
            other = decided.get(overload)
            if other is not None and _exactness(other) == _exactness(op) and rows[overload] != row:
                raise OpTableError(f"{other!r} and {op!r} both name {overload}, and give it different policies.")
            check_row(overload, row)
            rows[overload], decided[overload] = row, op
    return rows


def _exactness(op: str) -> int:
    """Return 0 for a family, 1 for an op and 2 for an overload."""
    if op.startswith(FAMILY_SIGN):
        return 0
    return 1 + ("." in op.rpartition("::")[2])


def _overloads(op: str, is_foreign: bool) -> list[str]:
    if op.startswith(FAMILY_SIGN):
        return _family(op)
    if not _NAME.fullmatch(op):
        raise UnknownOpError(f"{shown(op)} can't be an op's name: write 'op', 'op.overload' or 'namespace::op'.")
    if is_foreign and "::" in op and "." in op and find_overload(op) is None:
        return [op.removesuffix(".default")]
    return resolve(op)


def _family(name: str) -> list[str]:
    known = LISTS.families()
    if name[1:] not in known:
        raise UnknownOpError(f"unknown family {shown(name)}{nearest(name, [FAMILY_SIGN + n for n in known])}")
    return [overload for op in known[name[1:]] if find_overload(overload := full_name(op)) is not None]


def _parse_row(op: str, spec: Any, source: str) -> Row:
    if not isinstance(spec, Mapping):
        return Row(_policy(op, spec), (), source)
    cells = {d: _policy(op, p) for d, p in spec.items()}
    default = cells.pop("default", None)
    if default is None and not cells:
        raise OpTableError(f"{op!r}: a rule by dtype names at least one dtype, or 'default'.")
    return Row(default, tuple((_region_dtype(op, d), p) for d, p in cells.items()), source)


def _policy(op: str, name: Any) -> CastPolicy:
    if isinstance(name, str) and len(name) < 80:
        return CastPolicy.parse(name)
    raise UnknownPolicyError(
        f"unknown policy {shown(name)} for {op!r}. Policies are: {', '.join(p.value for p in CastPolicy)}."
    )


def _region_dtype(op: str, name: torch.dtype | str) -> torch.dtype:
    dtype = parse_dtype(name)
    if dtype not in CASTABLE:
        raise OpTableError(
            f"{op!r}: no region runs in {dtype}. In TOML an overload's name is written in quotes: "
            '"softmax.int" = "fp32".'
        )
    return dtype


APPEND_DTYPE = {
    "aten::norm.Scalar": "aten::norm.ScalarOpt_dtype",
    "aten::norm.names_ScalarOpt_dim": "aten::norm.names_ScalarOpt_dim_dtype",
    "aten::norm.ScalarOpt_dim": "aten::norm.ScalarOpt_dim_dtype",
}
"""Overloads that ``fp32_append_dtype`` serves, and the ones that take the dtype."""


def check_row(overload: str, row: Row) -> None:
    """Refuse a row that the op's schema can't serve.

    Raises:
        OpTableError: It says why.
    """
    op = find_overload(overload)
    policies = row.policies()
    if op is None:
        return
    refused = LISTS.refused()
    if overload in refused:
        raise OpTableError(f"no rule may name {overload}: {refused[overload]}.")
    if is_in_place(op) and policies - {CastPolicy.PROMOTE, CastPolicy.BANNED, CastPolicy.FALLTHROUGH}:
        raise OpTableError(
            f"{overload} writes in place, so only 'promote' (its other arguments take the dtype of the tensor "
            "written to), 'banned' and 'fallthrough' apply to it."
        )
    has_dtype = any(a.name == "dtype" for a in op._schema.arguments)
    if CastPolicy.FP32_SET_OPT_DTYPE in policies and not has_dtype:
        raise OpTableError(f"fp32_set_opt_dtype needs an op with a dtype argument; {overload} has none.")
    if CastPolicy.FP32_APPEND_DTYPE in policies and overload not in APPEND_DTYPE:
        raise OpTableError(f"fp32_append_dtype applies to {', '.join(APPEND_DTYPE)} only, not to {overload}.")
