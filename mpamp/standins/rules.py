"""An op table from a file, for every region of a process."""

from __future__ import annotations

import os

import torch

from ..devices.registry import set_op_rules
from ..rules.optable import ANY_DEVICE, OpTable

__all__ = ["use_table"]


def use_table(path: str | os.PathLike[str]) -> None:
    """Set a file's table as the rules of its device for the process; one for any device as those of the devices here.

    Raises:
        OpTableError: It holds none.
    """
    table = OpTable.load(path)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    here = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    for device in here if table.device == ANY_DEVICE else [table.device]:
        set_op_rules(device, table)
