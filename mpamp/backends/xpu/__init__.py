"""Intel's GPUs: bfloat16 by default, as Intel's extension documents; torch's own ``torch.xpu`` runs them."""

from __future__ import annotations

import importlib.util

import torch

from ...plugins.backend import Backend
from ...plugins.hookspecs import hookimpl

__all__ = ["XpuBackend", "mpamp_backends"]


class XpuBackend(Backend):
    """GPUs through torch's ``xpu`` device."""

    device_type = "xpu"
    autocast_key = "AutocastXPU"
    default_dtype = torch.bfloat16
    tensor_attribute = "is_xpu"
    has_triton = True
    watched_modules = ("intel_extension_for_pytorch",)

    def prepare(self) -> None:
        # Intel's extension registers Autocast kernels when imported: those must not land on top of ours.
        if self.is_available() and importlib.util.find_spec("intel_extension_for_pytorch") is not None:
            importlib.import_module("intel_extension_for_pytorch")


@hookimpl(trylast=True)
def mpamp_backends() -> list[Backend]:
    return [XpuBackend()]
