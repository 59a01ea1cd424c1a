"""A plugin that takes a device of mpamp's own, without saying that it means to."""

from __future__ import annotations

from mpamp import Backend, OpTable
from mpamp.plugins.hookspecs import hookimpl


class Other(Backend):
    device_type = "cpu"
    autocast_key = "AutocastCPU"

    def op_table(self) -> OpTable:
        return OpTable.named("uniform", self.device_type)


@hookimpl
def mpamp_backends() -> list[Backend]:
    return [Other()]
