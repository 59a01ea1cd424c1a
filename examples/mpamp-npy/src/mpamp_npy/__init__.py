"""The plugin: all that mpamp needs to know of the device "npy"."""

from __future__ import annotations

import torch

from mpamp import Backend, OpTable
from mpamp.plugins.hookspecs import hookimpl

from . import device

__all__ = ["NpyBackend", "mpamp_backends"]

MPAMP_API_VERSION = 1


class NpyBackend(Backend):
    """The processor, posing as a card; torch has no autocast kernels for it, so all that run are mpamp's."""

    device_type = device.NAME
    autocast_key = "AutocastPrivateUse1"
    default_dtype = torch.bfloat16

    def op_table(self) -> OpTable:
        return OpTable.from_rows(OpTable.named("default", "xpu"), name="default", device=self.device_type)

    def is_emulated(self, dtype: torch.dtype) -> bool:
        return True  # by whatever the processor does


@hookimpl
def mpamp_backends() -> list[Backend]:
    device.register()
    return [NpyBackend()]
