"""Writes what the docs say of op tables, from the tables themselves.

A page holds a line such as ``<!-- table: default cpu -->`` where the rows of that table go when the docs are built.
``additions.md`` is a file, to be read without building anything: ``python docs/generate.py`` writes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mpamp import oplists
from mpamp.cli.output import dtype_name
from mpamp.errors import OpTableError
from mpamp.oplists import table_names
from mpamp.rules.eligibility import find_overload, is_in_place, is_out_of_place
from mpamp.rules.optable import OpTable, Row
from mpamp.rules.policy import CastPolicy
from mpamp.rules.rows import check_row

DEVICES = ("cpu", "cuda", "xpu")
_MARKER = re.compile(r"^<!-- (names|table|diff|families|policies|refused): *(.*?) *-->$", flags=re.M)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill the markers of a page; mkdocs calls this for each."""
    return _MARKER.sub(lambda found: _WRITERS[found[1]](*found[2].split()), markdown)


def names() -> str:
    """Return which named table is there for which device."""
    known = {device: table_names(device) for device in DEVICES}
    lines = [f"| table | {' | '.join(DEVICES)} |", f"|---|{'---|' * len(DEVICES)}"]
    for name in sorted({n for found in known.values() for n in found}):
        cells = [f"{len(OpTable.named(name, d))} ops" if name in known[d] else "" for d in DEVICES]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def table(name: str, device: str) -> str:
    """Return a table's ops by policy, and by dtype where that matters."""
    rows = OpTable.named(name, device)
    lines = ["| policy | regions of | ops |", "|---|---|---|"]
    for policy in CastPolicy:
        by_regions: dict[str, list[str]] = {}
        for op, row in rows.items():
            dtypes = [dtype_name(d) for d, p in row.by_dtype if p is policy]
            if row.policy is policy:
                others = [dtype_name(d) for d, p in row.by_dtype if p is not policy]
                by_regions.setdefault("all but " + ", ".join(others) if others else "any dtype", []).append(op)
            elif dtypes:
                by_regions.setdefault(", ".join(dtypes), []).append(op)
        for regions, ops in sorted(by_regions.items()):
            lines.append(f"| `{policy}` | {regions} | {_listed(ops)} |")
    return "\n".join(lines)


def diff(device: str, left: str, right: str) -> str:
    """Return where two named tables differ, in a row for each kind of change."""
    changes: dict[tuple[str, str], list[str]] = {}
    for d in OpTable.named(left, device).diff(OpTable.named(right, device)):
        changes.setdefault((str(d.left or "not listed"), str(d.right or "not listed")), []).append(d.op)
    lines = [f"| `{left}` | `{right}` | ops |", "|---|---|---|"]
    for (before, after), ops in sorted(changes.items()):
        lines.append(f"| {before} | {after} | {_listed(ops)} |")
    return "\n".join(lines)


def families() -> str:
    """Return the families of ops, each with its ops."""
    lines = ["| family | ops |", "|---|---|"]
    return "\n".join([*lines, *(f"| `@{name}` | {_listed(ops)} |" for name, ops in sorted(oplists.families().items()))])


def additions() -> str:
    """Return the page of the rows that the default tables have and torch's don't."""
    native, default = ({d: OpTable.named(name, d) for d in DEVICES} for name in ("native", "default"))
    ops = sorted({op for d in DEVICES for op in default[d] if op not in native[d]})
    counts = ", ".join(f"{sum(op not in native[d] for op in default[d])} on {d}" for d in DEVICES)
    lines = [
        "# What the default tables add",
        "",
        "Rows where torch's own tables have none, written by `docs/generate.py`: ops that raise on lower-precision or",
        f"mixed arguments, or overflow: {counts}. `torch`: torch has the row; empty: the op isn't listed.",
        "Rows that torch has and the default changes are in [the differences](differences.md).",
        "",
        f"| op | {' | '.join(DEVICES)} |",
        f"|---|{'---|' * len(DEVICES)}",
    ]
    for op in ops:
        cells = ["torch" if op in native[d] else _policies(default[d].get(op)) for d in DEVICES]
        lines.append(f"| `{_short(op)}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _policies(row: Row | None) -> str:
    if row is None:
        return ""
    cells = [f"{policy} in {dtype_name(dtype)}" for dtype, policy in row.by_dtype]
    return ", ".join([*([] if row.policy is None else [str(row.policy)]), *cells])


def policies() -> str:
    """Return how many of torch's own overloads take each policy."""
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
    found = {n: op for n in names if (op := find_overload(n)) is not None}
    kinds = [(is_out_of_place, "out of place"), (is_in_place, "in place")]
    lines = [f"| policy | {' | '.join(kind for _, kind in kinds)} |", "|---|---|---|"]
    for policy in CastPolicy:
        taking = [sum(is_kind(op) and _takes(n, policy) for n, op in found.items()) for is_kind, _ in kinds]
        lines.append(f"| `{policy}` | {' | '.join(map(str, taking))} |")
    return "\n".join(lines)


def _takes(overload: str, policy: CastPolicy) -> bool:
    try:
        check_row(overload, Row(policy))
    except OpTableError:
        return False
    return True


def refused() -> str:
    """Return the ops that no rule may name, by the reason."""
    reasons: dict[str, list[str]] = {}
    for op, why in oplists.refused().items():
        reasons.setdefault(why, []).append(op)
    lines = ["| ops | why no rule may name them |", "|---|---|"]
    return "\n".join([*lines, *(f"| {_listed(ops)} | {why} |" for why, ops in reasons.items())])


def _listed(ops: list[str]) -> str:
    return ", ".join(f"`{_short(op)}`" for op in ops)


def _short(op: str) -> str:
    return op.removeprefix("aten::")


_WRITERS: dict[str, Callable[..., str]] = {
    "names": names,
    "table": table,
    "diff": diff,
    "families": families,
    "policies": policies,
    "refused": refused,
}

if __name__ == "__main__":
    (Path(__file__).parent / "additions.md").write_text(additions(), encoding="utf-8")
