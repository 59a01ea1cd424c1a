"""A trace as text, and as tables of rich."""

from __future__ import annotations

import itertools
from typing import Any

from .records import OpUse, Summary, short_name

__all__ = ["COLUMNS", "as_rich", "as_text", "cells", "headline", "size"]

COLUMNS = ("module", "op", "policy", "rule", "in", "out", "calls", "casts", "kept", "bytes cast", "host us")
_TEXT = 6
"""The first columns hold text, the others numbers."""


def size(number: float) -> str:
    """Return a number of bytes as people write it.

    Example:
        >>> size(12), size(2048), size(3_500_000)
        ('12 B', '2.0 KiB', '3.3 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError


_SHORT = {"float": "fp", "bfloat": "bf", "complex": "c", "int": "i", "uint": "u"}


def dtypes(names: tuple[str, ...]) -> str:
    """Return dtypes in few letters, in order.

    Example:
        >>> dtypes(("bfloat16", "float32", "float32", "int64", "bool"))
        'bf16 fp32x2 i64 bool'
    """
    short = []
    for name in names:
        stem = name.rstrip("0123456789")
        short.append(_SHORT[stem] + name.removeprefix(stem) if stem in _SHORT else name)
    groups = ((name, len(list(group))) for name, group in itertools.groupby(short))
    return " ".join(name if count == 1 else f"{name}x{count}" for name, count in groups)


def cells(use: OpUse) -> tuple[str, ...]:
    """Return what each column shows of a use."""
    place = use.module or "(outside)"
    return (
        place if use.phase == "forward" else f"{place} [{use.phase}]",
        short_name(use.op),
        use.policy or "-",
        use.rule or "-",
        dtypes(use.dtypes_in),
        dtypes(use.dtypes_out),
        *(str(use.calls), str(use.casts), str(use.kept_used), size(use.cast_bytes), f"{use.host_us:.0f}"),
    )


def headline(summary: Summary) -> str:
    """Return the sums of a trace in one line."""
    calls, casts, kept = (summary.total(name) for name in ("calls", "casts", "kept_used"))
    moved, found = size(summary.total("cast_bytes")), len(summary.findings)
    return f"{calls} calls of ops, {casts} casts of {moved}, {kept} kept casts used, {found} findings"


def as_text(summary: Summary) -> str:
    """Return a trace as plain text: the sums, the uses in columns, the findings, and what wasn't seen."""
    rows = [COLUMNS, *map(cells, summary.uses)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = [
        "  ".join(c.ljust(w) if i < _TEXT else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    found = [f"* {finding}" for finding in summary.findings] or ["* nothing"]
    unseen = [f"* {line}" for line in summary.unseen]
    by_design = [f"* {finding}" for finding in summary.by_design]
    parts = [
        headline(summary),
        "",
        *(line.rstrip() for line in lines),
        "",
        "Findings:",
        *found,
        *(["", "By design:", *by_design] if by_design else []),
        "",
        "Not seen:",
        *unseen,
    ]
    return "\n".join(parts)


def as_rich(summary: Summary) -> Any:
    """Return a trace as what rich prints."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    uses = Table(title=headline(summary))
    for i, name in enumerate(COLUMNS):
        uses.add_column(name, justify="left" if i < _TEXT else "right", overflow="fold")
    for use in summary.uses:
        uses.add_row(*map(Text, cells(use)))
    findings = Table(title="Findings" if summary.findings else "Findings: none")
    for name in ("finding", "what would change it"):
        findings.add_column(name, overflow="fold")
    for finding in summary.findings:
        findings.add_row(Text(f"{finding.kind}: {finding.text}"), Text(finding.advice))
    for finding in summary.by_design:
        findings.add_row(Text(f"by design: {finding.text}"), Text(finding.advice))
    return Group(uses, findings, Text("\n".join(("Not seen:", *summary.unseen))))
