"""What a device must say about itself to have AMP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..oplists import table_names
from ..rules.optable import OpTable
from ..torch_internals import dispatch_has_kernel_for_dispatch_key, dispatch_key_for_device

__all__ = ["Backend", "TorchNativeBackend"]


class Backend:
    """A device type's dtypes and op table; subclass it and set at least ``device_type``.

    Every method has a default that fits a device which torch knows.

    Example:
        >>> class Npu(Backend):
        ...     device_type = "npu"
        ...     autocast_key = "AutocastPrivateUse1"
        >>> Npu().default_dtype
        torch.float16
    """

    device_type: str
    """torch's name for the device, such as ``"xpu"``."""
    autocast_key: str
    """The dispatch key whose kernels autocast runs, such as ``"AutocastXPU"``."""
    default_dtype: torch.dtype = torch.float16
    """What a region runs in when it is given no dtype."""
    lower_precision_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    """What a region may run in, beside float32."""
    tensor_attribute: str = ""
    """The Tensor attribute that is true on this device (``"is_xpu"``), where there is one: it is quick to read."""
    has_sparse_lower_precision: bool = True
    """Whether sparse tensors are multiplied in lower precision too; where not, such products run in float32."""
    has_triton: bool = False
    """Whether Triton, where it is installed, compiles for this device: large losses then need no float32 copy."""
    watched_modules: tuple[str, ...] = ()
    """Modules that register Autocast kernels of their own when imported."""

    replaces_builtin: bool = False
    """Whether a plugin's backend means to stand in for mpamp's own of the same device."""

    def is_available(self) -> bool:
        """Tell whether this machine has such a device; must not create a context on it."""
        module = getattr(torch, self.device_type, None)
        return module is not None and bool(module.is_available())

    def op_table(self) -> OpTable:
        """Return the device's default table: mpamp's own for a device that it ships one for, else ``uniform``."""
        name = "default" if "default" in table_names(self.device_type) else "uniform"
        return OpTable.named(name, self.device_type)

    def is_emulated(self, dtype: torch.dtype) -> bool:
        """Tell whether this machine computes ``dtype`` without units of its own, and so slower."""
        return False

    def known_faults(self) -> list[str]:
        """Return what this machine computes wrongly, and what is done about it, a clause each, for ``mpamp doctor``."""
        return []

    def prepare(self) -> None:
        """Do what must come before the first kernel is installed, such as importing the vendor's package."""

    def capture_check(self) -> Callable[[], bool] | None:
        """Return a function that tells whether the calling thread records a graph for replay, or None."""
        check = getattr(getattr(torch, self.device_type, None), "is_current_stream_capturing", None)
        return check if check is not None and self.is_available() else None

    def capture_address(self) -> int | None:
        """Return the address of a C function that tells, for the compiled engine, whether a stream records a graph.

        It is ``int status(void* stream, int* out)``: what it returns and what it writes are 0 where nothing is
        recorded. None, where there is none, leaves ops that keep casts to the engine in Python.
        """
        return None

    def stream_check(self) -> Callable[[torch.Tensor], int] | None:
        """Return a function that numbers the stream on which a tensor's device queues work now, or None.

        None means that the device has one queue. A stream's number is its own as long as the stream exists; streams
        and events themselves are torch's generic ones (``torch.accelerator.current_stream``, ``torch.Event``).
        """
        accelerator = torch.accelerator.current_accelerator()
        has_streams = hasattr(getattr(torch, self.device_type, None), "current_stream")
        if accelerator is None or accelerator.type != self.device_type or not has_streams or not self.is_available():
            return None
        return lambda tensor: torch.accelerator.current_stream(tensor.device).stream_id

    def has_kernel(self, op: str) -> bool:
        """Tell whether the device has a kernel of its own for an op, such as ``"aten::_amp_update_scale_"``.

        Where one for gradient scaling is missing, ordinary ops do its work.
        """
        try:
            key = dispatch_key_for_device(self.device_type)
        except RuntimeError:  # torch doesn't know the device yet
            return False
        return bool(dispatch_has_kernel_for_dispatch_key(op, key))

    def read_later(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
        """Start to copy a small tensor to the host without waiting; return what gives the copy once it is there."""
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or accelerator.type != tensor.device.type:
            copy = tensor.detach().clone()
            return lambda: copy
        try:
            pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
        except RuntimeError:  # the device can't copy without the host
            copy = tensor.cpu()
            return lambda: copy
        pinned.copy_(tensor, non_blocking=True)
        event = torch.Event(tensor.device)
        event.record(torch.accelerator.current_stream(tensor.device))
        return lambda: pinned if event.query() else None

    def tensor_check(self) -> Callable[[torch.Tensor], bool]:
        """Return a function that tells whether a tensor is on this device."""
        name, attribute = self.device_type, self.tensor_attribute

        def has_attribute(tensor: Any) -> bool:
            return bool(getattr(tensor, attribute))

        def has_device(tensor: torch.Tensor) -> bool:
            return tensor.device.type == name

        return has_attribute if attribute else has_device

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.device_type!r}>"


class TorchNativeBackend(Backend):
    """A device that torch autocasts by itself and no plugin covers: torch's own kernels run, and no others."""

    def __init__(self, device_type: str, autocast_key: str) -> None:
        self.device_type, self.autocast_key = device_type, autocast_key
        self.default_dtype = torch.get_autocast_dtype(device_type)

    def op_table(self) -> OpTable:
        return OpTable.from_rows({}, name="native", device=self.device_type)
