"""``torch.<absent device>``: its functions and classes, by the device that stands in for it."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

import torch

from . import host
from .classes import stand_in
from .patches import Patches, wrapped
from .refusals import refused
from .target import Target

__all__ = ["redirect_namespaces"]

_COUNTS = ("device_count", "_device_count_nvml")
_LEFT = ("amp", "is_available")
"""What is not replaced here though it is public."""


def redirect_namespaces(patches: Patches, target: Target) -> None:
    """Have the functions of each absent device's namespace speak of the one that stands in.

    Only the first absent device says that it is available: scripts choose among several.
    """
    # Where torch is built for the absent device, this asks its namespace; nothing generic is there.
    patches.wrap(torch.accelerator, "is_available", lambda _: lambda: target.accelerator is not None)
    if not target.is_accelerator:
        patches.wrap(torch.profiler.profile, "__init__", lambda original: _of_processors(original, target))
    for number, device_type in enumerate(target.absent):
        module = getattr(torch, device_type)
        contents = _contents(module, target)
        if number > 0:
            contents.update({name: _own(getattr(module, name), host.zero) for name in _COUNTS if name in contents})
        for name, value in contents.items():
            patches.put(module, name, value)
        patches.wrap(module, "is_available", lambda _, is_first=number == 0: lambda: is_first)  # type: ignore[misc]
        _redirect_submodules(patches, module, target)
        flags = getattr(torch.backends, device_type, None)
        if hasattr(flags, "cufft_plan_cache"):
            patches.put(flags, "cufft_plan_cache", host.PlanCache())
        if not target.is_accelerator:
            _redirect_tools(patches, module, target)


def _contents(module: types.ModuleType, target: Target) -> dict[str, Any]:
    made = host.namespace(target)
    if target.is_accelerator:
        native = torch.get_device_module(target.device)
        made.update({name: _named(getattr(native, name), target) for name in made if hasattr(native, name)})
    found = {name: _own(getattr(module, name), value) for name, value in made.items() if hasattr(module, name)}
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name, None)
        if name in found or name in _LEFT or name.endswith(("Tensor", "Storage", "Error")):
            continue
        if isinstance(value, type) and not issubclass(value, Exception):
            found[name] = stand_in(value, refused(f"{module.__name__}.{name}", target.device))
        elif isinstance(value, types.FunctionType) and not name.startswith("_"):
            found[name] = wrapped(value, refused(f"{module.__name__}.{name}", target.device))
    return found


def _own(original: Any, value: Any) -> Any:
    """Return a function of this name's own: Dynamo has a rule for each, and takes one object for one name."""
    if not callable(value) or isinstance(original, type):
        return value
    return wrapped(original, lambda *args, **kwargs: value(*args, **kwargs))


def _named(value: Any, target: Target) -> Any:
    """Return a function of the device's own namespace that understands names of absent devices."""
    if not isinstance(value, types.FunctionType):
        return value

    def function(*args: Any, **kwargs: Any) -> Any:
        args = tuple(arg if type(arg) is int else target.present(arg) for arg in args)
        if "device" in kwargs:
            kwargs["device"] = target.present(kwargs["device"])
        return value(*args, **kwargs)

    return wrapped(value, function)


_MARKERS = ("mark", "range", "range_end", "range_pop", "range_push", "range_start", "start", "stop", "profile", "init")
_SUBMODULES = ("nvtx", "profiler", "memory", "random", "streams", "graphs")


def _redirect_submodules(patches: Patches, module: types.ModuleType, target: Target) -> None:
    """Replace in submodules what ``torch.<device>`` has from them, and marks for the vendor's profilers."""
    own = vars(module)
    for name in _SUBMODULES:
        try:
            submodule = importlib.import_module(f"{module.__name__}.{name}")
        except ImportError:
            continue
        if name in ("nvtx", "profiler"):
            for marker in _MARKERS:
                if hasattr(submodule, marker):
                    patches.put(submodule, marker, _own(getattr(submodule, marker), _mark(marker)))
            continue
        for public in getattr(submodule, "__all__", ()):
            if public in own and getattr(submodule, public) is not own[public]:
                patches.put(submodule, public, own[public])


_TOOLS = ("tunable", "nccl", "memory", "gds", "green_contexts")
_UNLISTED = ("version", "unique_id", "init_rank", "_dump_snapshot", "_record_memory_history", "_snapshot")
_SERVED: dict[str, Any] = {"is_enabled": False, "tuning_is_enabled": False, "version": (0, 0, 0)}
"""What is asked of tools that aren't there, and the answer: scripts go by it."""


def _redirect_tools(patches: Patches, module: types.ModuleType, target: Target) -> None:
    """Refuse what tunes, traces and connects cards, and answer what is asked of it."""
    for tool in _TOOLS:
        try:
            submodule = importlib.import_module(f"{module.__name__}.{tool}")
        except ImportError:
            continue
        for name in (*_UNLISTED, *(() if tool == "memory" else submodule.__all__)):
            value = getattr(submodule, name, None)
            if isinstance(value, type):
                _refuse_class(patches, submodule, name, target)
            if not isinstance(value, types.FunctionType) or name == "is_available":
                continue
            if name in _SERVED:
                answer = _SERVED[name]
                patches.put(submodule, name, _own(value, lambda answer=answer: answer))
            else:
                patches.put(submodule, name, wrapped(value, refused(f"{submodule.__name__}.{name}", target.device)))


def _refuse_class(patches: Patches, module: types.ModuleType, name: str, target: Target) -> None:
    """Refuse to make instances, by the class and by functions that it has for that."""
    original, path = getattr(module, name), f"{module.__name__}.{name}"
    for key, value in list(vars(original).items()):
        if isinstance(value, staticmethod):
            refuse = wrapped(value.__func__, refused(f"{path}.{key}", target.device))
            patches.put(original, key, staticmethod(refuse))
    patches.put(module, name, stand_in(original, refused(path, target.device)))


def _of_processors(original: Callable[..., None], target: Target) -> Callable[..., None]:
    """Have a profile of an absent device's activities be one of the processor's: torch has no such activities here."""
    absent = {name.upper() for name in target.absent}

    def __init__(self: Any, *args: Any, activities: Any = None, **kwargs: Any) -> None:
        if activities is not None:
            cpu = torch.profiler.ProfilerActivity.CPU
            activities = list(dict.fromkeys(cpu if a.name in absent else a for a in activities))
        original(self, *args, activities=activities, **kwargs)

    return __init__


def _mark(name: str) -> Callable[..., Any]:
    """Return what does nothing, in a ``with`` statement where the marker is for one."""
    return host.StreamContext if name in ("range", "profile") else host.zero
