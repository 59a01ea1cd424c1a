"""What one step runs, and the memory that it needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from ..engine.casts.cache import cache_info
from ..testing.counting import KernelCounter, WeightCastCounter
from ..torch_internals import TorchDispatchMode
from .timing import Variant, is_card

__all__ = ["CastCounter", "Counts", "HostSyncCounter", "count", "peak_memory"]

_aten = torch.ops.aten
_READS = frozenset({_aten._local_scalar_dense, _aten.nonzero, _aten.equal, _aten.masked_select, _aten.is_nonzero})


class HostSyncCounter(TorchDispatchMode):
    """Count the ops that make the host wait for the device: reads of values, and copies from it.

    The ops that would wait on an accelerator count on the CPU too.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the exemption for torch does not reach super()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = getattr(func, "overloadpacket", None)
        if packet in _READS:
            self.count += 1
        elif packet in (_aten._to_copy, _aten.copy_):
            source, target = (args[0], result) if packet is _aten._to_copy else (args[1], args[0])
            self.count += is_card(source.device) and not is_card(target.device)
        return result


class CastCounter(TorchDispatchMode):
    """Count the copies from one dtype to another."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the exemption for torch does not reach super()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = getattr(func, "overloadpacket", None)
        # In inference mode `to` itself arrives, also where it has nothing to do.
        if packet in (_aten._to_copy, _aten.to):
            self.count += args[0].dtype is not result.dtype
        elif packet is _aten.copy_:
            self.count += args[0].dtype is not args[1].dtype
        return result


@dataclass(frozen=True)
class Counts:
    """What one execution ran. What can't be counted is None.

    Attributes:
        kernels: The ops that reached the device, views included.
        casts: Those that changed a dtype.
        weight_casts: Those that read a parameter and wrote a smaller dtype.
        host_syncs: The times that the host waited for the device.
        cache_casts: The casts of weights that mpamp's own cache made (``mpamp.cache_info``).
        launches: The kernels and copies that an accelerator ran, by torch's profiler.
    """

    kernels: int | None
    casts: int | None
    weight_casts: int | None
    host_syncs: int | None
    cache_casts: int
    launches: int | None


def count(variant: Variant, weights: Iterable[torch.Tensor], device: torch.device, *, is_compiled: bool) -> Counts:
    """Count what one execution of a variant runs in the steady state.

    Args:
        variant: What to run.
        weights: The parameters whose casts are counted.
        device: Where it runs.
        is_compiled: Whether it runs compiled code: the ops in that are not seen, and would be compiled anew.
    """
    variant.setup()
    seen: tuple[int | None, int | None, int | None, int | None] = (None, None, None, None)
    with variant.context():
        variant.batch(2)
        before = cache_info().casts
        variant.batch(1)
        cache_casts = cache_info().casts - before
        launches = _launches(variant, device)
        if not is_compiled:
            kernels, casts, of_weights, syncs = (
                KernelCounter(),
                CastCounter(),
                WeightCastCounter(weights),
                HostSyncCounter(),
            )
            with kernels, casts, of_weights, syncs:
                variant.batch(1)
            seen = kernels.total, casts.count, of_weights.count, syncs.count
    return Counts(*seen, cache_casts, launches)


def _launches(variant: Variant, device: torch.device) -> int | None:
    if not is_card(device):
        return None
    with torch.profiler.profile(acc_events=True) as profiler:
        variant.batch(1)
        torch.accelerator.synchronize()
    ran = [event for event in profiler.key_averages() if event.device_type is not DeviceType.CPU]
    return sum(int(event.count) for event in ran if event.self_device_time_total and not event.is_user_annotation)


def peak_memory(variant: Variant, device: torch.device) -> int | None:
    """Return the most bytes that were allocated on the device during one step, or None where it doesn't tell."""
    module = torch.get_device_module(device)
    if not hasattr(module, "reset_peak_memory_stats"):
        return None
    variant.setup()
    with variant.context():
        variant.batch(2)
        torch.accelerator.synchronize()
        module.reset_peak_memory_stats()
        variant.batch(1)
        torch.accelerator.synchronize()
    return int(module.max_memory_allocated())
