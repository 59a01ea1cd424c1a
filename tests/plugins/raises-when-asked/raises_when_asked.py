"""A plugin whose backends raise when they are asked about themselves."""

from __future__ import annotations

from types import SimpleNamespace

from mpamp import Backend, OpTable
from mpamp.plugins.hookspecs import hookimpl


class Maia(Backend):
    device_type, autocast_key = "maia", "AutocastMAIA"

    def op_table(self) -> OpTable:
        raise OSError("no table on this disk")


class Hpu(Backend):
    device_type, autocast_key = "hpu", "AutocastHPU"

    def is_available(self) -> bool:
        raise OSError("no driver")


@hookimpl
def _maia() -> list[Backend]:
    return [Maia()]


@hookimpl
def _hpu() -> list[Backend]:
    return [Hpu()]


maia, hpu = SimpleNamespace(mpamp_backends=_maia), SimpleNamespace(mpamp_backends=_hpu)
