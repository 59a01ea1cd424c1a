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

__all__ = ["LACKS", "NAME", "DeviceModule", "from_host", "missing_facility", "register", "to_host"]

NAME = "npy"
LACKS: frozenset[str] = frozenset()
"""Overloads that the device can't run at all."""
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


def missing_facility() -> str:
    """Return what this torch lacks for a device in pure Python, or an empty string."""
    needed = {
        "torch.utils.backend_registration._setup_privateuseone_for_python_backend": hasattr(
            backend_registration, "_setup_privateuseone_for_python_backend"
        ),
        "torch._C._acc.create_empty_tensor": hasattr(getattr(torch._C, "_acc", None), "create_empty_tensor"),
    }
    lacking = [name for name, is_there in needed.items() if not is_there]
    return f"torch {torch.__version__} has no {' and no '.join(lacking)}" if lacking else ""


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
    is_ours = isinstance(value, torch.Tensor) and value.device.type == NAME
    return value.untyped_storage().payload if is_ours else value


def from_host(value: Any) -> Any:
    """Return a tensor on the device that holds a CPU tensor, without a copy; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return value
    if 0 in value.stride() and value.numel() > 1:
        value = value.contiguous()  # of expand(): what torch writes to must not overlap
    made = torch._C._acc.create_empty_tensor(tuple(value.shape), value.dtype)
    made.untyped_storage().payload = value
    return made


def _run_on_host(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any op on the processor; what it writes to is the caller's, and is returned as such."""
    on_host, options = tree_map(to_host, (args, kwargs))
    if options.get("device") is not None:
        options["device"] = torch.device("cpu")
    result = op(*on_host, **options)
    schema = op._schema
    written = [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if not written:
        return tree_map(from_host, result)
    for tensor in written:
        _follow(tensor)
    if not schema.returns:
        return None
    return written[0] if len(schema.returns) == 1 else tuple(written)


def _follow(written: Any) -> None:
    """Give a tensor on the device its CPU tensor's shape, where that was written to as ``out=`` and so resized."""
    held = to_host(written)
    if isinstance(held, torch.Tensor) and held is not written and held.shape != written.shape:
        written.data = from_host(held)


def _empty(size: Any, *, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
    return from_host(torch.empty(size, dtype=dtype))


def _empty_strided(size: Any, stride: Any, *, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
    return from_host(torch.empty_strided(size, stride, dtype=dtype))


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
    "_copy_from": _copy_from,
    "convolution_overrideable": _convolution,
    "convolution_backward_overrideable": _convolution_backward,
}
"""What the fallback can't do: make tensors, copy between devices, and what torch has a hook of its own for."""
