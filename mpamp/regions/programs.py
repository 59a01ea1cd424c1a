"""How a region goes into a program that a compiler makes: as regions of torch's own, the mark among them."""

from __future__ import annotations

import weakref

import torch

from ..devices.registry import DeviceState
from ..engine import install
from ..engine.compiling import Contexts
from ..engine.marks import compose_mark, mark_contexts
from ..engine.resolving import mark_here
from ..locks import LOCK
from ..rules.optable import OpTable
from ..rules.policy import CastPolicy

__all__ = ["contexts_of", "surrounding"]

_in_float32: weakref.WeakKeyDictionary[OpTable, OpTable] = weakref.WeakKeyDictionary()
"""The tables that stand for float32 regions in programs, and what they were made of."""


def surrounding(table: OpTable, dtype: torch.dtype) -> tuple[OpTable, torch.dtype]:
    """Return the table and dtype of the region that a scope's are of; in a program a float32 region has others."""
    with LOCK:
        whole = _in_float32.get(table)
    return (table, dtype) if whole is None else (whole, torch.float32)


def contexts_of(device: DeviceState, table: OpTable | None, dtype: torch.dtype) -> Contexts:
    """Return the ``torch.autocast`` regions that stand for one of ours in a program made here and now.

    Args:
        device: The device that it casts on.
        table: Its table; None is the device's default.
        dtype: What lower-precision ops run in.
    """
    whole = None
    if dtype is torch.float32:
        # torch.autocast takes no float32 on most devices: say it by the table instead.
        whole = device.table if table is None else table
        # By dtype, so that tables of two regions that differ in these rows differ too.
        low = {str(device.backend.default_dtype): "fp32"}
        rows = {op: low for op, row in whole.items() if CastPolicy.LOWER_PRECISION_FP in row.policies()}
        table, dtype = whole.override(rows, source="float32"), device.backend.default_dtype
    mark = compose_mark(mark_here(), device.type, table, is_compiled=True)
    if whole is not None:
        _remember(mark.table(device.type), whole)
    install(device, device.table if table is None else table, dtype)
    # The carriers first: export looks for a mark where the device's own is entered.
    return (*mark_contexts(mark), (device.type, dtype, True))


def _remember(table: OpTable | None, whole: OpTable) -> None:
    if table is not None:
        with LOCK:
            _in_float32.pop(table, None)  # an equal table's: the entry is to live as long as the mark's own
            _in_float32[table] = whole
