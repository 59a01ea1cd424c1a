"""The other of two plugins for the device "twin"."""

from __future__ import annotations

from mpamp import Backend, OpTable
from mpamp.plugins.hookspecs import hookimpl


class Second(Backend):
    device_type = "twin"
    autocast_key = "AutocastPrivateUse1"

    def op_table(self) -> OpTable:
        return OpTable.named("uniform", self.device_type)


@hookimpl
def mpamp_backends() -> list[Backend]:
    return [Second()]
