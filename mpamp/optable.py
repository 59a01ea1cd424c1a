"""OpTable: what each op does in a region. Immutable, readable, and the same thing as its TOML file."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .eligibility import find_overload, is_in_place, resolve
from .errors import OpTableError, UnknownOpError
from .policy import CASTABLE, CastPolicy

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Difference", "OpTable", "Row", "check_row", "parse_dtype"]

ANY_DEVICE = "any"
_TORCH = ".".join(torch.__version__.split(".")[:2])


def parse_dtype(name: torch.dtype | str) -> torch.dtype:
    """Return the dtype called ``name``, with or without ``torch.``.

    Raises:
        OpTableError: torch has no dtype of that name.

    Example:
        >>> parse_dtype("bfloat16"), parse_dtype("torch.float16")
        (torch.bfloat16, torch.float16)
    """
    if isinstance(name, torch.dtype):
        return name
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise OpTableError(f"unknown dtype {name!r}: write one of torch's names, such as 'bfloat16' or 'float16'.")
    return found


@dataclass(frozen=True, slots=True)
class Row:
    """One op's policy, by the region's dtype where it depends on that, and who decided it."""

    policy: CastPolicy | None
    by_dtype: tuple[tuple[torch.dtype, CastPolicy], ...] = ()
    source: str = field(default="user", compare=False)

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
        by_dtype = {**dict(base.by_dtype), **dict(self.by_dtype)}
        return Row(base.policy, tuple(sorted(by_dtype.items(), key=lambda cell: str(cell[0]))), self.source)

    def policies(self) -> set[CastPolicy]:
        """Return every policy that this row can give."""
        return {p for p in (self.policy, *(p for _, p in self.by_dtype)) if p is not None}

    def __str__(self) -> str:
        parts = [f"{str(d).removeprefix('torch.')}: {p}" for d, p in self.by_dtype]
        if not parts:
            return str(self.policy)
        return "{" + ", ".join([*parts, f"else: {self.policy}"]) + "}"


@dataclass(frozen=True, slots=True)
class Difference:
    """One op on which two tables differ; None where a table doesn't list it."""

    op: str
    left: Row | None
    right: Row | None

    def __str__(self) -> str:
        return f"{self.op}: {self.left or '-'} -> {self.right or '-'}"


class _RulesByDtype(dict[torch.dtype, dict[str, CastPolicy]]):
    """The table as the kernels read it: region dtype -> overload -> policy, filled on first use."""

    def __init__(self, rows: Mapping[str, Row]) -> None:
        super().__init__()
        self._rows = rows

    def __missing__(self, dtype: torch.dtype) -> dict[str, CastPolicy]:
        found = {op: policy for op, row in self._rows.items() if (policy := row.at(dtype)) is not None}
        self[dtype] = found
        return found


class OpTable(Mapping[str, Row]):
    """An immutable mapping from an op's overload (``"aten::softmax.int"``) to its policy.

    Args:
        rules: Op names to policies; a name means all eligible overloads, and a policy may be a
            mapping from dtype to policy, with ``"default"`` for the other dtypes.
        name: What the table is called in messages.
        device: The device type that it is for, or ``"any"``.
        source: Who decides these rows; shown by ``mpamp ops``.

    Raises:
        UnknownOpError: A name that torch doesn't know; the message gives the nearest.
        UnknownPolicyError: A policy that doesn't exist.
        OpTableError: A policy that the op's schema can't serve.

    Example:
        >>> table = OpTable({"mm": "lower_precision_fp", "softmax": {"float16": "fp32"}}, name="mine")
        >>> table.policy("aten::softmax.int", torch.float16)
        <CastPolicy.FP32: 'fp32'>
        >>> table.policy("softmax.int", torch.bfloat16) is None
        True
    """

    __slots__ = ("_rows", "device", "fingerprint", "name", "rules")
    _rows: dict[str, Row]
    device: str
    fingerprint: str
    name: str
    rules: _RulesByDtype

    def __init__(
        self,
        rules: Mapping[str, Any] | None = None,
        *,
        name: str = "custom",
        device: str = ANY_DEVICE,
        source: str = "user",
    ) -> None:
        self._set(_parse_rules(rules or {}, source), name, device)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._rows, self.name, self.device)

    def _set(self, rows: dict[str, Row], name: str, device: str) -> None:
        rows = dict(sorted(rows.items()))
        text = "\n".join(f"{op}={row}" for op, row in rows.items())
        fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
        values = (rows, name, device, _RulesByDtype(rows), fingerprint)
        for attribute, value in zip(("_rows", "name", "device", "rules", "fingerprint"), values, strict=True):
            object.__setattr__(self, attribute, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"an OpTable never changes: {name} can't be set; override() makes another table.")

    @classmethod
    def from_rows(cls, rows: Mapping[str, Row], *, name: str, device: str = ANY_DEVICE) -> OpTable:
        """Return a table of ready rows, unchecked: ops that this torch lacks are kept."""
        self = cls.__new__(cls)
        self._set(dict(rows), name, device)
        return self

    @staticmethod
    def named(name: str, device: str) -> OpTable:
        """Return the table that ships under ``name`` for a device type.

        Raises:
            OpTableError: There is no such table for that device; the message lists those there are.

        Example:
            >>> OpTable.named("native", "cuda").policy("binary_cross_entropy")
            <CastPolicy.BANNED: 'banned'>
        """
        from .oplists import load_table

        return load_table(name, device)

    def __getitem__(self, op: str) -> Row:
        row = self._rows.get(op)
        if row is None:
            row = self._rows[(op if "::" in op else f"aten::{op}").removesuffix(".default")]
        return row

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __hash__(self) -> int:
        return hash((self.device, self.fingerprint))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OpTable):
            return NotImplemented
        return self.device == other.device and self._rows == other._rows

    def __repr__(self) -> str:
        return f"<OpTable {self.name!r} for {self.device}: {len(self)} ops, {self.fingerprint}>"

    def policy(self, op: str, dtype: torch.dtype | None = None) -> CastPolicy | None:
        """Return the policy of one overload in a region of ``dtype``, or None if it isn't listed."""
        row = self.get(op)
        return None if row is None else row.at(dtype)

    def override(self, rules: Mapping[str, Any] | OpTable, *, source: str = "user", name: str = "") -> OpTable:
        """Return a table with these rules on top of this one's; this one doesn't change.

        Example:
            >>> base = OpTable({"softmax": "fp32"})
            >>> base.override({"softmax": "fallthrough"}).policy("softmax.int")
            <CastPolicy.FALLTHROUGH: 'fallthrough'>
        """
        if isinstance(rules, OpTable) and rules.device not in (ANY_DEVICE, self.device):
            raise OpTableError(f"table {rules.name!r} is for device {rules.device!r}, this one for {self.device!r}.")
        extra = rules._rows if isinstance(rules, OpTable) else _parse_rules(rules, source)
        rows = {**self._rows, **{op: row.over(self._rows.get(op)) for op, row in extra.items()}}
        return OpTable.from_rows(rows, name=name or f"{self.name}+{source}", device=self.device)

    def diff(self, other: OpTable) -> list[Difference]:
        """Return the ops on which ``other`` differs from this table, in alphabetical order.

        Example:
            >>> print(*OpTable({"gelu": "fp32"}).diff(OpTable({"gelu": "promote", "silu": "fp32"})), sep="; ")
            aten::gelu: fp32 -> promote; aten::silu: - -> fp32
        """
        ops = sorted({*self._rows, *other._rows})
        pairs = ((op, self._rows.get(op), other._rows.get(op)) for op in ops)
        return [Difference(op, left, right) for op, left, right in pairs if left != right]

    def to_toml(self) -> str:
        """Return the table as TOML text that ``from_toml`` reads back to an equal table.

        Ops that a vendor's module has kernels for and no table knows are left out: they are this process's.
        """
        is_foreign = any(find_overload(op) is None for op in self._rows)
        version = "another" if is_foreign else _TORCH
        lines = [f"name = {_quote(self.name)}", f"device = {_quote(self.device)}", f"torch = {_quote(version)}"]
        lines += ["", "[ops]"]
        for op, row in self._rows.items():
            if not row.policies():
                continue  # somebody's own kernel, whatever it does
            cells = {str(d).removeprefix("torch."): str(p) for d, p in row.by_dtype}
            if row.policy is not None and cells:
                cells["default"] = str(row.policy)
            inline = "{ " + ", ".join(f"{d} = {_quote(p)}" for d, p in cells.items()) + " }"
            exact = op if "." in op else f"{op}.default"
            lines.append(f"{_quote(exact)} = {inline if cells else _quote(str(row.policy))}")
        return "\n".join(lines) + "\n"

    @classmethod
    def from_toml(cls, text: str, *, source: str = "user") -> OpTable:
        """Return the table written in ``text``.

        Keys: ``[ops]`` (required, op -> policy), ``name``, ``device``; ``base``: a named table of
        that device which the rules go on top of; ``torch``: the version that the table was written
        for. Ops that a torch of another version lacks are kept, not refused.

        Raises:
            OpTableError: The text isn't TOML, or has keys or values that a table can't have.

        Example:
            >>> OpTable.from_toml('[ops]\\nsoftmax = "fp32"').policy("softmax.int")
            <CastPolicy.FP32: 'fp32'>
        """
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise OpTableError(f"not a TOML op table: {error}.") from error
        unknown = set(data) - {"name", "device", "base", "ops", "torch"}
        if unknown or not isinstance(data.get("ops"), dict):
            raise OpTableError(
                f"an op table has the keys name, device, base, torch and an [ops] section; got {sorted(data)}."
            )
        device, name = str(data.get("device", ANY_DEVICE)), str(data.get("name", "custom"))
        rows = _parse_rules(data["ops"], source, is_foreign=data.get("torch", _TORCH) != _TORCH)
        table = cls.from_rows(rows, name=name, device=device)
        return cls.named(str(data["base"]), device).override(table, name=name) if "base" in data else table

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table to a TOML file."""
        Path(path).write_text(self.to_toml(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> OpTable:
        """Return the table in a TOML file; errors as ``from_toml``, with the file's name."""
        try:
            return cls.from_toml(Path(path).read_text(encoding="utf-8"), source=str(path))
        except OpTableError as error:
            raise type(error)(f"{path}: {error}") from error


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _rebuild(rows: dict[str, Row], name: str, device: str) -> OpTable:
    return OpTable.from_rows(rows, name=name, device=device)


def _parse_rules(rules: Mapping[str, Any], source: str, *, is_foreign: bool = False) -> dict[str, Row]:
    if not isinstance(rules, Mapping):
        raise OpTableError(f"rules are a mapping from op to policy, got {type(rules).__name__}.")
    rows: dict[str, Row] = {}
    decided: dict[str, str] = {}
    for op, spec in sorted(rules.items(), key=lambda rule: _precision(rule[0])):
        if not isinstance(op, str):
            raise UnknownOpError(f"an op is named by a string such as 'softmax', got {op!r}.")
        row = _parse_row(spec, source)
        for overload in _resolve(op, is_foreign):
            other = decided.get(overload)
            if other is not None and _precision(other) == _precision(op) and rows[overload] != row:
                raise OpTableError(f"{other!r} and {op!r} both name {overload}, and give it different policies.")
            check_row(overload, row)
            rows[overload], decided[overload] = row, op
    return rows


def _resolve(op: str, is_foreign: bool) -> list[str]:
    try:
        return resolve(op)
    except UnknownOpError:
        if not is_foreign or "::" not in op or "." not in op:
            raise
        return [op.removesuffix(".default")]


def _precision(op: object) -> int:
    return int("." in str(op).partition("::")[2] or ("::" not in str(op) and "." in str(op)))


def _parse_row(spec: Any, source: str) -> Row:
    if not isinstance(spec, Mapping):
        return Row(CastPolicy.parse(spec), (), source)
    cells = {d: CastPolicy.parse(p) for d, p in spec.items()}
    default = cells.pop("default", None)
    by_dtype = sorted(((_region_dtype(d), p) for d, p in cells.items()), key=lambda cell: str(cell[0]))
    if default is None and not by_dtype:
        raise OpTableError("a rule by dtype names at least one dtype, or 'default'.")
    return Row(default, tuple(by_dtype), source)


def _region_dtype(name: torch.dtype | str) -> torch.dtype:
    dtype = parse_dtype(name)
    if dtype not in CASTABLE:
        raise OpTableError(
            f'no region runs in {dtype}. In TOML an overload\'s name is written in quotes: "softmax.int" = "fp32".'
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
