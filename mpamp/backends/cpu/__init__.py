"""The CPU's backend: bfloat16 by default; what oneDNN can't run in lower precision here runs in float32."""

from __future__ import annotations

import functools

import torch

from ...plugins.backend import Backend
from ...plugins.hookspecs import hookimpl
from ...rules.optable import OpTable
from ...torch_internals import is_amx_fp16_supported, is_amx_tile_supported, is_avx512_bf16_supported
from .probe import KERNELS, fails, leaves_garbage

__all__ = ["CpuBackend", "mpamp_backends"]


class CpuBackend(Backend):
    """Processors, through torch's own kernels and oneDNN."""

    device_type = "cpu"
    autocast_key = "AutocastCPU"
    default_dtype = torch.bfloat16
    tensor_attribute = "is_cpu"
    has_sparse_lower_precision = False  # MKL's kernels are float32 and float64
    watched_modules = ("intel_extension_for_pytorch",)

    def is_available(self) -> bool:
        return True

    def is_emulated(self, dtype: torch.dtype) -> bool:
        return not _has_units(dtype)

    def op_table(self) -> OpTable:
        table = OpTable.named("default", self.device_type)
        in_float32 = {op: [d for d in self.lower_precision_dtypes if _lacks(op, d)] for op in KERNELS}
        rules = {
            op: {"default": "lower_precision_fp", **dict.fromkeys(dtypes, "fp32")}
            for op, dtypes in in_float32.items()
            if dtypes
        }
        return table.override(rules, source="this processor", name=table.name) if rules else table

    def known_faults(self) -> list[str]:
        return [
            f"conv3d's weight gradient in {dtype} is partly memory that this processor's kernel doesn't write, so "
            "regions run conv3d in float32"
            for dtype in self.lower_precision_dtypes
            if _breaks_conv3d(dtype)
        ]


@functools.cache
def _onednn_runs(dtype: torch.dtype) -> bool:
    check = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    return torch.backends.mkldnn.is_available() and bool(getattr(torch.ops.mkldnn, check)())


@functools.cache
def _has_units(dtype: torch.dtype) -> bool:
    if dtype is torch.bfloat16:
        return is_avx512_bf16_supported() or is_amx_tile_supported()
    return dtype is torch.float32 or (dtype is torch.float16 and is_amx_fp16_supported())


def _lacks(op: str, dtype: torch.dtype) -> bool:
    """Tell whether this processor has no kernel that can be trusted with an op in ``dtype``.

    Without oneDNN's for a dtype, torch has kernels of its own, which run anywhere, for all of them but nn.LSTM.
    """
    if op == "conv3d" and _breaks_conv3d(dtype):
        return True
    return _fails(op, dtype) if _onednn_runs(dtype) else op == "mkldnn_rnn_layer"


@functools.cache
def _fails(op: str, dtype: torch.dtype) -> bool:
    return fails(KERNELS[op], dtype)


@functools.cache
def _breaks_conv3d(dtype: torch.dtype) -> bool:
    """Tell whether conv3d's weight gradient can't be trusted; asked of processors with units for ``dtype`` alone."""
    return _has_units(dtype) and leaves_garbage(dtype)


@hookimpl(trylast=True)
def mpamp_backends() -> list[Backend]:
    return [CpuBackend()]
