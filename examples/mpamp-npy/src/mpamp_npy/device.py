"""A PrivateUse1 device in pure Python: its memory is the host's, its kernels are the processor's.

A tensor on the device is a plain ``torch.Tensor`` whose storage carries a CPU tensor, ``payload``. It hangs on the
storage because that is what detaching, saving for backward and ``nn.Parameter`` share; attributes of a subclass of
Tensor get lost there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

from .missing import missing_facility

__all__ = ["NAME", "DeviceModule", "from_host", "register", "to_host"]

NAME = "npy"
_KEY = "PrivateUse1"
_libraries: list[torch.library.Library] = []


class DeviceModule:
    """What ``torch.npy`` is: what torch asks a device about itself."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: random numbers are the processor's."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes that ``torch.autocast("npy")`` may be given; torch requires this method."""
        return [torch.bfloat16, torch.float16]


def register() -> None:
    """Give torch's PrivateUse1 the name "npy" and its kernels; once per process.

    Raises:
        ImportError: This torch can't have a device in pure Python.
        RuntimeError: PrivateUse1 is another device's already.
    """
    if _libraries:
        return
    if missing_facility():
        raise ImportError(f"mpamp-npy needs torch 2.11 or later: {missing_facility()}.")
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=DeviceModule())
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(_run_on_host, _KEY)
    for op, kernel in _KERNELS.items():
        aten.impl(op, kernel, _KEY)
    _libraries.extend([everything, aten])


def to_host(value: Any) -> Any:
    """Return the CPU tensor behind a tensor on the device; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.device.type != NAME:
        return value
    held: torch.Tensor = value.untyped_storage().payload
    if held.shape == value.shape and held.stride() == value.stride() and not value.storage_offset():
        return held
    # A view that torch has made by itself. The payload may start further on in the host's memory than its storage.
    return held.as_strided(value.shape, value.stride(), held.storage_offset() + value.storage_offset())


def from_host(value: Any) -> Any:
    """Return a tensor on the device that holds a CPU tensor, without a copy; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return value
    made = torch._C._acc.create_empty_tensor(tuple(value.shape), value.dtype)
    if made.stride() != value.stride():  # such tensors are always contiguous; what torch makes of one asks for strides
        made.data = _Strided.like(value)
    made.untyped_storage().payload = value
    return made


class _Strided(torch.Tensor):
    """Lends its strides, and a storage of the right size, to a plain tensor."""

    @staticmethod
    def like(value: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"strides": value.stride(), "dtype": value.dtype, "device": f"{NAME}:0"}
        return torch.Tensor._make_wrapper_subclass(_Strided, value.size(), **options)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten._has_compatible_shallow_copy_type.default:
            return True
        raise NotImplementedError(f"{op} on a tensor that only lends its strides")


def _run_on_host(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any op on the processor; what it writes to is the caller's, and is returned as such."""
    on_host, options = tree_map(to_host, (list(args), kwargs))
    if options.get("device") is not None:
        options["device"] = torch.device("cpu")
    writes = [(i, a) for i, a in enumerate(op._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    outs = [a.name for _, a in writes if isinstance(kwargs.get(a.name), torch.Tensor)]
    options.update({name: options[name].new_empty(0) for name in outs})  # torch passes out= of any shape here
    result = op(*on_host, **options)
    for name in outs:
        _fill(kwargs[name], options[name])
    written = [args[i] if i < len(args) else kwargs.get(a.name) for i, a in writes]
    if not written:
        return tree_map(from_host, result)
    if op._schema.name == "aten::resize_":
        written[0].data = from_host(on_host[0])
    if not op._schema.returns:
        return None
    return written[0] if len(op._schema.returns) == 1 else tuple(written)


def _fill(out: torch.Tensor, value: torch.Tensor) -> None:
    """Write a CPU tensor into one on the device, which takes its shape."""
    if out.shape == value.shape:
        to_host(out).copy_(value)
    else:
        out.data = from_host(value.to(out.dtype))


def _empty(size: Any, *, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
    return from_host(torch.empty(size, dtype=dtype))


def _empty_strided(size: Any, stride: Any, *, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
    return from_host(torch.empty_strided(size, stride, dtype=dtype))


def _as_strided(x: torch.Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> torch.Tensor:
    held, offset = x.untyped_storage().payload, x.storage_offset() if storage_offset is None else storage_offset
    return from_host(held.as_strided(size, stride, held.storage_offset() + offset))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    to_host(target).copy_(to_host(source))
    return target


def _convolution(*args: Any) -> torch.Tensor:
    return from_host(torch.ops.aten.convolution(*tree_map(to_host, args)))


def _convolution_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Any:
    on_host = tree_map(to_host, (grad, x, weight))
    return tree_map(from_host, torch.ops.aten.convolution_backward(*on_host, None, *rest))


_KERNELS: dict[str, Callable[..., Any]] = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "as_strided": _as_strided,
    "_copy_from": _copy_from,
    "convolution_overrideable": _convolution,
    "convolution_backward_overrideable": _convolution_backward,
}
"""What the fallback can't do: make tensors, copy between devices, and what torch has a hook of its own for."""
