"""The TOML file that an op table is: writing one, and reading what somebody else wrote."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import OpTableError
from .eligibility import find_overload
from .rows import Row, shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["TORCH_VERSION", "loads", "parse", "read", "write"]

TORCH_VERSION = ".".join(torch.__version__.split(".")[:2])
_KEYS: dict[str, type] = {"name": str, "device": str, "base": str, "torch": str, "ops": dict}
_LONGEST_LINE = 4096
"""No rule is as long; and the parser's time grows with the square of a dotted key's length."""


def write(name: str, device: str, rows: Mapping[str, Row]) -> str:
    """Return a table as TOML text."""
    is_foreign = any(find_overload(op) is None for op in rows)
    version = "another" if is_foreign else TORCH_VERSION
    lines = [f"name = {_quote(name)}", f"device = {_quote(device)}", f"torch = {_quote(version)}", "", "[ops]"]
    for op, row in rows.items():
        if not row.policies():
            continue  # somebody's own kernel, whatever it does
        cells = {str(d).removeprefix("torch."): str(p) for d, p in row.by_dtype}
        if row.policy is not None and cells:
            cells["default"] = str(row.policy)
        inline = "{ " + ", ".join(f"{d} = {_quote(p)}" for d, p in cells.items()) + " }"
        exact = op if "." in op else f"{op}.default"
        lines.append(f"{_quote(exact)} = {inline if cells else _quote(str(row.policy))}")
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def parse(text: str) -> dict[str, Any]:
    """Return what TOML text holds, with the keys and types that a table's has.

    Raises:
        OpTableError: It isn't TOML, or no table.
    """
    data = loads(text)
    if set(data) - set(_KEYS) or not isinstance(data.get("ops"), dict):
        raise OpTableError(
            f"an op table has the keys name, device, base, torch and an [ops] section; got {shown(sorted(data))}."
        )
    for key, value in data.items():
        if not isinstance(value, _KEYS[key]):
            raise OpTableError(f"{key} is a string, got {shown(value)}.")
    return data


def loads(text: str) -> dict[str, Any]:
    """Return what TOML text holds, whatever its keys.

    Raises:
        OpTableError: It isn't TOML.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > _LONGEST_LINE:
            raise OpTableError(f"line {number} has {len(line)} characters: no line of an op table is as long.")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, or a thousand brackets, too
        raise OpTableError(f"not a TOML op table: {error}.") from error


def read(path: str | os.PathLike[str]) -> str:
    """Return the text of a file.

    Raises:
        OpTableError: It isn't text.
        OSError: It can't be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise OpTableError(f"not a TOML op table, which is UTF-8 text: {error}.") from error
