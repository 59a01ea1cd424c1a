"""NVIDIA's and AMD's GPUs: float16 by default."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from ...plugins.backend import Backend
from ...plugins.hookspecs import hookimpl
from ...torch_internals import cuda_get_current_raw_stream, cuda_get_device_count, cuda_is_current_stream_capturing

__all__ = ["CudaBackend", "mpamp_backends"]


class CudaBackend(Backend):
    """GPUs through torch's ``cuda`` device, ROCm builds included."""

    device_type = "cuda"
    autocast_key = "AutocastCUDA"
    default_dtype = torch.float16
    tensor_attribute = "is_cuda"
    has_triton = True

    def is_emulated(self, dtype: torch.dtype) -> bool:
        if dtype is not torch.bfloat16 or not self.is_available():
            return False
        return not torch.cuda.is_bf16_supported(including_emulation=False)

    def capture_check(self) -> Callable[[], bool] | None:
        return cuda_is_current_stream_capturing if _has_card() else None

    def capture_address(self) -> int | None:
        is_hip, major = bool(torch.version.hip), (torch.version.cuda or "").partition(".")[0]
        name = "hipStreamIsCapturing" if is_hip else "cudaStreamIsCapturing"
        for library in ("libamdhip64.so" if is_hip else f"libcudart.so.{major}", None):
            try:
                function = getattr(ctypes.CDLL(library), name)  # torch has loaded it: no path is looked up
            except (OSError, AttributeError):
                continue
            return ctypes.cast(function, ctypes.c_void_p).value
        return None

    def stream_check(self) -> Callable[[torch.Tensor], int] | None:
        if not _has_card():
            return None
        current = cuda_get_current_raw_stream
        return lambda tensor: current(tensor.get_device())


def _has_card() -> bool:
    """Tell whether torch itself finds a card: ``torch.cuda`` says so where another device stands in for it, too."""
    return torch.backends.cuda.is_built() and cuda_get_device_count() > 0


@hookimpl(trylast=True)
def mpamp_backends() -> list[Backend]:
    return [CudaBackend()]
