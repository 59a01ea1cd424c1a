"""``mpamp ops``: what a region does with an op, who decided it, and whose kernel runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

import mpamp
from mpamp.cli.output import dtype_name, errors_as_exits, print_json, print_table, quietly
from mpamp.devices.registry import DeviceState, device_state
from mpamp.engine import native_ops, needs_kernel
from mpamp.rules.optable import OpTable, Row
from mpamp.rules.policy import CastPolicy
from mpamp.rules.rows import parse_dtype

__all__ = ["ops"]


@click.command()
@click.option("--device", "device_name", help="The device type.  [default: the accelerator here, else cpu]")
@click.option("--dtype", "dtype_text", help="The region's dtype.  [default: the device's own]")
@click.option("--table", "table_name", help="A named table or a TOML file.  [default: the table in force]")
@click.option("--diff", "other_name", help="Show only where this table, a name or a file, differs from the first.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("op_names", nargs=-1, metavar="[OP]...")
def ops(
    device_name: str | None,
    dtype_text: str | None,
    table_name: str | None,
    other_name: str | None,
    as_json: bool,
    op_names: tuple[str, ...],
) -> None:
    """Show the policy of each OP (of every listed op, if none is named) in a region.

    OP is a name such as softmax, softmax.int, mylib::attention or, of a family, @fft. The kernel is torch's, mpamp's,
    or none: the op then runs in the dtypes that it is called with.
    """
    with errors_as_exits(), quietly():
        # A region without arguments picks the device as this command does.
        device = device_state(mpamp.autocast().device_type if device_name is None else device_name.partition(":")[0])
        dtype = _region_dtype(device, dtype_text)
        table = _table(device, table_name)
        wanted = [overload for name in op_names for overload in OpTable({name: CastPolicy.FALLTHROUGH})]
        other = None if other_name is None else _table(device, other_name)
    if other is None:
        _show(device, dtype, table, wanted, as_json)
    else:
        dtypes = device.backend.lower_precision_dtypes if dtype_text is None else (dtype,)
        _show_differences(device, dtypes, table, other, wanted, as_json)


def _region_dtype(device: DeviceState, name: str | None) -> torch.dtype:
    dtype = None if name is None else parse_dtype(name)
    return mpamp.autocast(device.type, dtype).dtype


def _table(device: DeviceState, name: str | None) -> OpTable:
    if name is None:
        return device.table
    if not name.endswith(".toml"):
        return OpTable.named(name, device.type)
    try:
        return device.table_for(OpTable.load(Path(name)))
    except OSError as error:
        raise click.UsageError(f"{name}: {error.strerror}") from error


def _show(device: DeviceState, dtype: torch.dtype, table: OpTable, wanted: list[str], as_json: bool) -> None:
    describe = _describer(device, dtype, table)
    records = [describe(op) for op in wanted or sorted({*table, *native_ops(device)})]
    if not wanted:
        records = [r for r in records if r["kernel"] != "none"]
    if as_json:
        head = {"device": device.type, "dtype": dtype_name(dtype), "table": table.name}
        print_json({**head, "fingerprint": table.fingerprint, "ops": records})
        return
    title = f"Table {table.name} in regions of {dtype_name(dtype)} on {device.type}"
    headings = ("op", "policy", "source", "kernel")
    print_table(title, headings, [[r[h] or "-" for h in headings] for r in records])


def _describer(device: DeviceState, dtype: torch.dtype, table: OpTable) -> Callable[[str], dict[str, Any]]:
    ours, natives = set(needs_kernel(device, table, dtype)), native_ops(device)

    def describe(op: str) -> dict[str, Any]:
        row = table.get(op)
        policy = None if row is None else row.at(dtype)
        kernel = "mpamp" if op in ours else "torch" if op in natives else "none"
        return {
            "op": op,
            "policy": None if policy is None else str(policy),
            "source": None if row is None or (policy is None and kernel == "none") else row.source,
            "kernel": kernel,
        }

    return describe


def _show_differences(
    device: DeviceState,
    dtypes: tuple[torch.dtype, ...],
    table: OpTable,
    other: OpTable,
    wanted: list[str],
    as_json: bool,
) -> None:
    def cells(row: Row | None) -> dict[str, str | None]:
        policies = {} if row is None else {d: row.at(d) for d in dtypes}
        return {dtype_name(d): None if policies.get(d) is None else str(policies[d]) for d in dtypes}

    pairs = [(d.op, cells(d.left), cells(d.right)) for d in table.diff(other) if not wanted or d.op in wanted]
    pairs = [pair for pair in pairs if pair[1] != pair[2]]
    if as_json:
        found = [{"op": op, "left": left, "right": right} for op, left, right in pairs]
        print_json({"device": device.type, "left": table.name, "right": other.name, "differences": found})
        return
    title = f"{len(pairs)} ops differ on {device.type}"
    print_table(title, ("op", table.name, other.name), [(op, _text(left), _text(right)) for op, left, right in pairs])


def _text(cells: dict[str, str | None]) -> str:
    """Return one policy where all dtypes have the same, else each dtype's."""
    if len(set(cells.values())) == 1:
        return next(iter(cells.values())) or "-"
    return ", ".join(f"{dtype}: {policy or '-'}" for dtype, policy in cells.items())
