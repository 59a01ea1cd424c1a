"""The op lists as data: families of ops (``families.toml``), the named tables made of them, facts about single ops."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from importlib import resources
from typing import Any

from ..errors import OpTableError, nearest
from ..rules.eligibility import find_overload, full_name
from ..rules.optable import ANY_DEVICE, OpTable, Row
from ..rules.policy import CastPolicy
from ..rules.rows import FAMILY_SIGN, parse_dtype
from ..rules.shipped import LISTS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "facts",
    "families",
    "load_table",
    "lower_precision_ops",
    "parameters_of",
    "refused",
    "table_names",
    "widening_ops",
]


_LOWER = CastPolicy.LOWER_PRECISION_FP


@functools.cache
def _data(file: str) -> dict[str, Any]:
    return tomllib.loads((resources.files(__package__) / file).read_text(encoding="utf-8"))


def families() -> dict[str, list[str]]:
    """Return every family of ops by name, each an ordered list of overloads, those of aten without the namespace.

    Example:
        >>> "fft_rfft2" in families()["fft"]
        True
    """
    return {name: list(ops) for name, ops in _families().items()}


@functools.cache
def _families() -> dict[str, list[str]]:
    listed = _data("families.toml")

    def expand(names: Iterable[str]) -> list[str]:
        parts = [expand(listed[name[1:]]) if name.startswith(FAMILY_SIGN) else [name] for name in names]
        return [op for part in parts for op in part]

    return {name: expand(names) for name, names in listed.items()}


@functools.cache
def refused() -> dict[str, str]:
    """Return why no rule may name an op, by overload.

    Example:
        >>> refused()["aten::empty_like"]
        'it gives memory, which kernels in C++ fill as the dtype that they asked for'
    """
    return {f"aten::{op}": group["why"] for group in _data("refused.toml").values() for op in group["ops"]}


def facts(kind: str) -> frozenset[str]:
    """Return the overloads of which ``facts.toml`` says so.

    Example:
        >>> "aten::erf" in facts("float32_tangents")
        True
    """
    return frozenset(full_name(op) for op in _data("facts.toml")[kind])


def parameters_of(op: str) -> tuple[str, ...]:
    """Return the names of an overload's tensors that are numbers for it, such as scales: float64 ones ask for nothing.

    Example:
        >>> parameters_of("aten::quantize_per_channel"), parameters_of("aten::mm")
        (('scales', 'zero_points'), ())
    """
    return tuple(_data("facts.toml")["parameters"].get(op.removeprefix("aten::"), ()))


def table_names(device: str) -> list[str]:
    """Return the names of the tables that ship for a device type.

    Example:
        >>> table_names("xpu")
        ['apex', 'default', 'intel-xpu', 'native', 'torch-2.13', 'torch-2.8', 'uniform']
    """
    tables = _data("tables.toml")
    return sorted(name for name, by_device in tables.items() if _has_section(tables, name, by_device, device))


def _has_section(tables: dict[str, Any], name: str, by_device: dict[str, Any], device: str) -> bool:
    section = by_device.get(device, by_device.get(ANY_DEVICE))
    if section is None:
        return False
    return "base" not in section or _has_section(tables, section["base"], tables[section["base"]], device)


@functools.lru_cache(maxsize=64)  # a device may have any name
def load_table(name: str, device: str) -> OpTable:
    """Return the named table of a device type.

    Raises:
        OpTableError: There is no table of that name for that device.

    Example:
        >>> load_table("default", "cuda").policy("fft_fft")
        <CastPolicy.FP32: 'fp32'>
    """
    known = table_names(device)
    if name not in known:
        raise OpTableError(
            f"no table {name!r} for device {device!r}{nearest(name, known)} Tables there: {', '.join(known) or 'none'}."
        )
    is_history = name.startswith("torch-")
    rows = {op: row for op, row in _rows(name, device).items() if is_history or find_overload(op) is not None}
    return OpTable.from_rows(rows, name=name, device=device)


@functools.cache
def lower_precision_ops() -> frozenset[str]:
    """Return the overloads that some named table runs in lower precision.

    Example:
        >>> "aten::linear" in lower_precision_ops()
        True
    """
    return frozenset(op for op, policy in _listed(_data("tables.toml")["uniform"][ANY_DEVICE]) if policy is _LOWER)


_WITH_DTYPE = ("sums", "sums_named", "softmax", "softmax_named", "prod", "prod_named", "vector_norm")


@functools.cache
def widening_ops() -> frozenset[str]:
    """Return the overloads that compute in the dtype they are asked for: ``fp32`` asks, and makes no copy itself.

    Example:
        >>> "aten::softmax.int" in widening_ops()
        True
    """
    return frozenset(f"aten::{op}" for family in _WITH_DTYPE for op in _families()[family])


def _rows(name: str, device: str) -> dict[str, Row]:
    by_device = _data("tables.toml")[name]
    section = by_device.get(device, by_device.get(ANY_DEVICE))
    rows = _rows(section["base"], device) if "base" in section else {}
    for part in (by_device[section["same_as"]] if "same_as" in section else {}, section):
        rows.update({op: Row(policy, (), name) for op, policy in _listed(part)})
        for op in _expand(part.get("drop", ())):
            rows.pop(op, None)
        for dtype, lists in part.items():
            if isinstance(lists, dict):
                rows.update(_at_dtype(rows, dtype, lists, name))
    return rows


def _at_dtype(rows: dict[str, Row], dtype: str, lists: dict[str, Any], name: str) -> dict[str, Row]:
    found = {}
    for op, policy in _listed(lists):
        base = rows.get(op, Row(None))
        found[op] = Row(base.policy, (*base.by_dtype, (parse_dtype(dtype), policy)), name)
    return found


def _listed(section: dict[str, Any]) -> list[tuple[str, CastPolicy]]:
    return [(op, policy) for policy in CastPolicy for op in _expand(section.get(policy.value, ()))]


def _expand(names: Iterable[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        found += _families()[name[1:]] if name.startswith(FAMILY_SIGN) else [name]
    return [full_name(op) for op in found]


LISTS.families, LISTS.refused, LISTS.table = families, refused, load_table
