"""OpTable: what each op does in a region. Immutable, readable, and the same thing as its TOML file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from ..errors import OpTableError
from . import tablefile
from .policy import CastPolicy
from .rows import Row, parse_dtype, parse_rules, shown
from .shipped import LISTS

__all__ = ["ANY_DEVICE", "Difference", "OpTable", "Row"]

ANY_DEVICE = "any"


@dataclass(frozen=True, slots=True)
class Difference:
    """One op on which two tables differ; None where a table doesn't list it."""

    op: str
    left: Row | None
    right: Row | None

    def __str__(self) -> str:
        return f"{self.op}: {self.left or '-'} -> {self.right or '-'}"


def _never_changes(self: object, *_: object, **__: object) -> NoReturn:
    raise TypeError("an OpTable never changes: override() makes another table.")


class _RulesByDtype(dict[torch.dtype, Mapping[str, CastPolicy]]):
    """The table as the kernels read it: region dtype -> overload -> policy, filled on first use."""

    __slots__ = ("_rows",)

    def __init__(self, rows: Mapping[str, Row]) -> None:
        super().__init__()
        self._rows = rows

    def __missing__(self, dtype: torch.dtype) -> Mapping[str, CastPolicy]:
        found = {op: policy for op, row in self._rows.items() if (policy := row.at(dtype)) is not None}
        rules = MappingProxyType(found)
        if isinstance(dtype, torch.dtype):
            super().__setitem__(dtype, rules)
        return rules

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _never_changes


class OpTable(Mapping[str, Row]):
    """An immutable mapping from an op's overload (``"aten::softmax.int"``) to its policy.

    Args:
        rules: Op names to policies; a name means all eligible overloads, and ``"@fft"`` the family
            ``fft`` of ops. A policy may be a mapping from dtype to policy, with ``"default"`` for
            the other dtypes.
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

    __slots__ = ("__weakref__", "_fingerprint", "_rows", "device", "name", "rules")
    _fingerprint: str
    _rows: Mapping[str, Row]
    device: str
    name: str
    rules: Mapping[torch.dtype, Mapping[str, CastPolicy]]

    def __new__(
        cls,
        rules: Mapping[str, Any] | None = None,
        *,
        name: str = "custom",
        device: str = ANY_DEVICE,
        source: str = "user",
    ) -> OpTable:
        return cls.from_rows(parse_rules({} if rules is None else rules, source), name=name, device=device)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (dict(self._rows), self.name, self.device)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"an OpTable never changes: {name} can't be set; override() makes another table.")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"an OpTable never changes: {name} can't be deleted.")

    @classmethod
    def from_rows(cls, rows: Mapping[str, Row], *, name: str, device: str = ANY_DEVICE) -> OpTable:
        """Return a table of ready rows, not checked against torch: ops that this one lacks are kept.

        Raises:
            OpTableError: The name, the device or a row is something else.
        """
        for text in (name, device):
            if not _is_text(text):
                raise OpTableError(f"a table's name and device are text, got {shown(text)}.")
        wrong = next((row for row in rows.values() if not isinstance(row, Row)), None)
        if wrong is not None:
            raise OpTableError(f"a table is made of rows, got {shown(wrong)}.")
        ordered = dict(sorted(rows.items()))
        self = object.__new__(cls)
        values = {"_rows": MappingProxyType(ordered), "name": name, "device": device, "_fingerprint": ""}
        for attribute, value in {**values, "rules": _RulesByDtype(ordered)}.items():
            object.__setattr__(self, attribute, value)
        return self

    @property
    def fingerprint(self) -> str:
        """What tells tables of other rows apart, in processes to come too; made once, for tables that are asked."""
        if not self._fingerprint:
            text = "\n".join(f"{op}={row}" for op, row in self._rows.items())
            object.__setattr__(self, "_fingerprint", hashlib.sha256(text.encode()).hexdigest()[:16])
        return self._fingerprint

    @staticmethod
    def named(name: str, device: str) -> OpTable:
        """Return the table that ships under ``name`` for a device type.

        Raises:
            OpTableError: There is no such table for that device; the message lists those there are.

        Example:
            >>> OpTable.named("native", "cuda").policy("binary_cross_entropy")
            <CastPolicy.BANNED: 'banned'>
        """
        return LISTS.table(name, device)  # type: ignore[no-any-return]

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

    def policy(self, op: str, dtype: torch.dtype | str | None = None) -> CastPolicy | None:
        """Return the policy of one overload in a region of ``dtype``, or None if it isn't listed."""
        row = self.get(op)
        return None if row is None else row.at(None if dtype is None else parse_dtype(dtype))

    def override(self, rules: Mapping[str, Any] | OpTable, *, source: str = "user", name: str = "") -> OpTable:
        """Return a table with these rules on top of this one's; this one doesn't change.

        Example:
            >>> base = OpTable({"softmax": "fp32"})
            >>> base.override({"softmax": "fallthrough"}).policy("softmax.int")
            <CastPolicy.FALLTHROUGH: 'fallthrough'>
        """
        if isinstance(rules, OpTable) and rules.device not in (ANY_DEVICE, self.device):
            raise OpTableError(f"table {rules.name!r} is for device {rules.device!r}, this one for {self.device!r}.")
        extra = rules._rows if isinstance(rules, OpTable) else parse_rules(rules, source)
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
        return tablefile.write(self.name, self.device, self._rows)

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
        data = tablefile.parse(text)
        device, name = data.get("device", ANY_DEVICE), data.get("name", "custom")
        is_foreign = data.get("torch", tablefile.TORCH_VERSION) != tablefile.TORCH_VERSION
        table = cls.from_rows(parse_rules(data["ops"], source, is_foreign=is_foreign), name=name, device=device)
        return cls.named(data["base"], device).override(table, name=name) if "base" in data else table

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table to a TOML file."""
        Path(path).write_text(self.to_toml(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> OpTable:
        """Return the table in a TOML file; errors as ``from_toml``, with the file's name.

        Raises:
            OSError: The file can't be read.
        """
        try:
            return cls.from_toml(tablefile.read(path), source=str(path))
        except OpTableError as error:
            raise type(error)(f"{path}: {error}") from error


def _rebuild(rows: dict[str, Row], name: str, device: str) -> OpTable:
    return OpTable.from_rows(rows, name=name, device=device)


def _is_text(value: object) -> bool:
    """Tell whether a value is a string that a file can hold: one half of a surrogate pair can't be written."""
    return isinstance(value, str) and value.encode(errors="replace").decode() == value
