"""An op table from a file, for every region of a process."""

from __future__ import annotations

import os

import torch

from ..devices.listeners import LISTENERS
from ..devices.registry import DeviceState, set_op_rules
from ..rules.optable import ANY_DEVICE, OpTable

__all__ = ["await_device", "use_table"]


def use_table(path: str | os.PathLike[str]) -> None:
    """Set a file's table as the rules of its device for the process; one for any device as those of the devices here.

    Raises:
        OpTableError: It holds none.
    """
    table = OpTable.load(path)
    for device in _devices_of(table):
        set_op_rules(device, table)


def await_device(path: str) -> None:
    """Do in a child process what ``use_table`` did in the one that started it, once each device is asked for.

    It is called while torch is being imported, where no device can be asked for: its backend runs kernels.
    """
    table = OpTable.load(path)

    def set_rules(device: DeviceState) -> None:
        if device.type in _devices_of(table):
            device.set_rules(dict(table))

    LISTENERS.is_found.append(set_rules)


def _devices_of(table: OpTable) -> list[str]:
    if table.device != ANY_DEVICE:
        return [table.device]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]
