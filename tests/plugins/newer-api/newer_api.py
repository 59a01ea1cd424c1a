"""A plugin for a later mpamp."""

from __future__ import annotations

from mpamp import Backend, OpTable
from mpamp.plugins.hookspecs import hookimpl

MPAMP_API_VERSION = 99


class Future(Backend):
    device_type = "future"
    autocast_key = "AutocastPrivateUse1"

    def op_table(self) -> OpTable:
        return OpTable.named("uniform", self.device_type)


@hookimpl
def mpamp_backends() -> list[Backend]:
    return [Future()]
