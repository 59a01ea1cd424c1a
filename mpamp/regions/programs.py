"""How a region goes into a program that a compiler makes: as regions of torch's own, the mark among them."""

from __future__ import annotations

import torch

from ..devices.registry import DeviceState
from ..engine import install
from ..engine.compiling import Contexts
from ..engine.marks import compose_mark, mark_contexts
from ..engine.resolving import mark_here
from ..rules.optable import OpTable
from ..rules.policy import CastPolicy

__all__ = ["contexts_of"]


def contexts_of(device: DeviceState, table: OpTable | None, dtype: torch.dtype) -> Contexts:
    """Return the ``torch.autocast`` regions that stand for one of ours in a program made here and now.

    Args:
        device: The device that it casts on.
        table: Its table; None is the device's default.
        dtype: What lower-precision ops run in.
    """
    if dtype is torch.float32:
        # torch.autocast takes no float32 on most devices: say it by the table instead.
        whole = device.table if table is None else table
        lower = {op: "fp32" for op, row in whole.items() if CastPolicy.LOWER_PRECISION_FP in row.policies()}
        table, dtype = whole.override(lower, source="float32"), device.backend.default_dtype
    mark = compose_mark(mark_here(), device.type, table, is_compiled=True)
    install(device, device.table if table is None else table, dtype)
    # The carriers first: export looks for a mark where the device's own is entered.
    return (*mark_contexts(mark), (device.type, dtype, True))
