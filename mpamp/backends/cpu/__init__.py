"""The CPU's backend: bfloat16 by default; what oneDNN can't run in lower precision here runs in float32."""

from __future__ import annotations

import functools

import torch

from ...optable import OpTable
from ...plugins.hookspecs import hookimpl
from ..base import Backend

__all__ = ["CpuBackend", "mpamp_backends"]


class CpuBackend(Backend):
    """Processors, through torch's own kernels and oneDNN."""

    device_type = "cpu"
    autocast_key = "AutocastCPU"
    default_dtype = torch.bfloat16
    tensor_attribute = "is_cpu"
    watched_modules = ("intel_extension_for_pytorch",)

    def is_available(self) -> bool:
        return True

    def is_emulated(self, dtype: torch.dtype) -> bool:
        return not _has_units(dtype)

    def op_table(self) -> OpTable:
        table = OpTable.named("default", self.device_type)
        slow = {dtype: "fp32" for dtype in self.lower_precision_dtypes if not _onednn_runs(dtype)}
        if not slow:
            return table
        # nn.LSTM goes to a oneDNN primitive that exists only where the processor has the dtype's units.
        rule = {"default": "lower_precision_fp", **{str(dtype): policy for dtype, policy in slow.items()}}
        return table.override({"mkldnn_rnn_layer": rule}, source="this processor", name=table.name)


@functools.cache
def _onednn_runs(dtype: torch.dtype) -> bool:
    check = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    return torch.backends.mkldnn.is_available() and bool(getattr(torch.ops.mkldnn, check)())


@functools.cache
def _has_units(dtype: torch.dtype) -> bool:
    checks = {
        torch.bfloat16: ("_is_avx512_bf16_supported", "_is_amx_tile_supported"),
        torch.float16: ("_is_avx512_fp16_supported", "_is_amx_fp16_supported"),
    }.get(dtype, ())
    found = [getattr(torch.cpu, name)() for name in checks if hasattr(torch.cpu, name)]
    return dtype is torch.float32 or any(found) or (not found and _onednn_runs(dtype))


@hookimpl(trylast=True)
def mpamp_backends() -> list[Backend]:
    return [CpuBackend()]
