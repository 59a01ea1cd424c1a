"""What ``torch.<accelerator>`` has, for a device without streams, memory pools and cards to choose from."""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .target import Target

__all__ = ["Event", "Properties", "Stream", "StreamContext", "namespace", "zero"]

CAPABILITY = (7, 0)
"""The least that has units for float16: scripts choose more by it than can be had here."""


class Stream:
    """A queue of work that is done at once."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.priority, self.cuda_stream, self.stream_id = priority, 0, 0
        self.device = device

    def synchronize(self) -> None:
        """Return: all work is done."""

    def wait_event(self, event: Any) -> None:
        """Return: the event has happened."""

    def wait_stream(self, stream: Any) -> None:
        """Return: the other's work is done."""

    def query(self) -> bool:
        """Tell that all work is done."""
        return True

    def record_event(self, event: Any = None) -> Any:
        """Record an event now."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Event:
    """A moment; times between two are in ms."""

    def __init__(self, enable_timing: bool = False, **kwargs: Any) -> None:
        self._moment: float | None = None

    def record(self, stream: Any = None) -> None:
        """Remember the time."""
        self._moment = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Return: it has happened."""

    def query(self) -> bool:
        """Tell that it has happened."""
        return True

    def synchronize(self) -> None:
        """Return: it has happened."""

    def elapsed_time(self, end_event: Event) -> float:
        """Return the time to another event in ms.

        Raises:
            ValueError: One of them was never recorded.
        """
        if self._moment is None or end_event._moment is None:
            raise ValueError("both events must be recorded before the time between them is asked for.")
        return (end_event._moment - self._moment) * 1000


@dataclass(frozen=True)
class Properties:
    """What ``get_device_properties`` returns; memory in bytes."""

    name: str
    total_memory: int
    major: int = CAPABILITY[0]
    minor: int = CAPABILITY[1]
    multi_processor_count: int = 1
    warp_size: int = 32
    max_threads_per_multi_processor: int = 1024
    is_integrated: bool = True
    is_multi_gpu_board: bool = False
    has_fp16: bool = True
    has_fp64: bool = True
    gcnArchName: str = ""
    uuid: str = ""


def _memory() -> tuple[int, int]:
    """Return the free and the whole memory of the machine in bytes, as far as the system tells."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    except (AttributeError, OSError, ValueError):
        return 0, 0


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: there is nothing to wait for, to empty or to mark."""


def zero(*args: Any, **kwargs: Any) -> int:
    """Return 0, of what is not counted here."""
    return 0


class StreamContext(contextlib.ContextDecorator):
    """``torch.<accelerator>.stream(stream)``, where all is done in one queue; markers of profilers are like it."""

    def __init__(self, stream: Any = None, *args: Any, **kwargs: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class PlanCache:
    """``torch.backends.<device>.cufft_plan_cache``, of each index too: the device that stands in keeps no plans in it.

    Example:
        >>> plans = PlanCache()
        >>> plans[0].max_size = 8
        >>> plans.clear()
        >>> plans.size, plans.max_size
        (0, 8)
    """

    size = property(lambda self: 0)

    def __init__(self) -> None:
        self.max_size = 4096

    def __getitem__(self, device: Any) -> PlanCache:
        return self

    def clear(self) -> None:
        """Do nothing."""


class _DeviceScope(contextlib.ContextDecorator):
    """``torch.<accelerator>.device(index)``."""

    def __init__(self, device: Any = None) -> None:
        self.idx = device if isinstance(device, int) else getattr(device, "index", None) or 0
        self.prev_idx = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def namespace(target: Target) -> dict[str, Any]:
    """Return what scripts find under the names of ``torch.cuda``, for a device that has no such namespace."""
    device = target.device
    name = platform.processor() or platform.machine()
    properties = Properties(name, _memory()[1], multi_processor_count=os.cpu_count() or 1)
    return {
        **_random(),
        **_streams(device),
        **_selection(),
        **dict.fromkeys(_NOTHING, _nothing),
        **dict.fromkeys(_ZERO, zero),
        "get_device_name": lambda device=None: name,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: CAPABILITY,
        "can_device_access_peer": lambda device, peer: False,
        "get_arch_list": list,
        "get_gencode_flags": lambda: "",
        "is_bf16_supported": lambda including_emulation=True: torch.bfloat16 in target.backend.lower_precision_dtypes,
        "is_tf32_supported": lambda: False,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "make_graphed_callables": lambda callables, *args, **kwargs: callables,
        "mem_get_info": lambda device=None: _memory(),
        "memory_stats": lambda device=None: defaultdict(int),
        "memory_stats_as_nested_dict": lambda device=None: defaultdict(lambda: defaultdict(lambda: defaultdict(int))),
        "memory_snapshot": lambda *args, **kwargs: [],
        "memory_summary": lambda device=None, abbreviated=False: f"no memory of {device} is counted\n",
        "get_sync_debug_mode": zero,
    }


_NOTHING = (
    "_lazy_init",
    "empty_cache",
    "init",
    "ipc_collect",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
    "set_stream",
    "set_sync_debug_mode",
    "synchronize",
)
_ZERO = (
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "device_memory_used",
)


def _random() -> dict[str, Any]:
    """Return the functions of the random state: the device's numbers come from torch's default generator."""

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    def set_rng_state(new_state: Any, device: Any = None) -> None:
        torch.set_rng_state(new_state)

    def set_rng_state_all(new_states: Any) -> None:
        for state in list(new_states)[:1]:
            torch.set_rng_state(state)

    return {
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "seed": torch.default_generator.seed,
        "seed_all": torch.default_generator.seed,
        "initial_seed": torch.default_generator.initial_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state": set_rng_state,
        "set_rng_state_all": set_rng_state_all,
        "default_generators": (torch.default_generator,),
    }


def _streams(device: torch.device) -> dict[str, Any]:
    default = Stream(device)
    return {
        "Stream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": lambda stream: StreamContext(stream),
        "current_stream": lambda device=None: default,
        "default_stream": lambda device=None: default,
    }


def _selection() -> dict[str, Callable[..., Any] | type]:
    """Return the functions that choose among cards: any number is taken, and remembered by the thread."""
    thread = threading.local()

    def set_device(device: Any) -> None:
        if isinstance(device, str):
            device = int(device.partition(":")[2] or 0)
        thread.index = (device if isinstance(device, int) else device.index) or 0

    return {
        "set_device": set_device,
        "current_device": lambda: getattr(thread, "index", 0),
        "device_count": lambda: 1,
        "_device_count_nvml": lambda: 1,
        "device": _DeviceScope,
        "device_of": _DeviceScope,
    }
