"""The engine: what casts an op's arguments. The rest of mpamp sees these functions, and the modules named here.

    install, withdraw, tidy   put kernels at a device's Autocast key for what a table says, and take them away
    needs_kernel, is_native   which ops those are, and which have a kernel of torch's or of a vendor's
    entries.enter, leave      change a thread's autocast state, and undo that in any order and after any exception
    casts.cache               find and keep the cast of a weight; how many were made and are kept
    losses.fused              what runs a large loss in float32 from its lower-precision arguments
    observe                   be told of each call of an op in a region, and of what was cast for it

A thread's state is in ``scope`` and ``marks``; ``resolving`` says which scope a call is in. The kernels are in
``python``, which is loaded by the first region: that makes ``import mpamp`` cheap.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from ..devices.listeners import LISTENERS
from ..devices.state import DeviceState
from ..rules.optable import OpTable
from .observing import Call, Cast, Observation

__all__ = [
    "BEFORE_FIRST_INSTALL",
    "build_core",
    "lacking_to_build",
    "which",
    "Call",
    "Cast",
    "Observation",
    "install",
    "installed",
    "is_native",
    "native_ops",
    "needs_kernel",
    "observe",
    "tidy",
    "withdraw",
]

BEFORE_FIRST_INSTALL: list[Callable[[], Any]] = []
"""Called once, before the first kernel of the process goes in."""


def _kernels() -> Any:
    return importlib.import_module(f"{__name__}.python.kernels")


LISTENERS.before_first_use.append(_kernels)


def install(device: DeviceState, table: OpTable, dtype: torch.dtype) -> bool:
    """Install what ``table`` needs in regions of ``dtype`` at the device's Autocast key; what is there stays.

    Returns whether every op of the table exists; a library that is imported later may bring the others.
    """
    return _kernels().install(device, table, dtype)  # type: ignore[no-any-return]


def withdraw(device: DeviceState, ops: Iterable[str] | None = None) -> None:
    """Take our kernels for a device, all or those of some overloads, out of the dispatcher; torch's own run again."""
    _kernels().withdraw(device, ops)


def tidy(device: DeviceState) -> None:
    """Take out the kernels that only rules of regions past asked for; a region that needs one puts it back."""
    _kernels().tidy(device)


def installed(device_type: str) -> list[str]:
    """Return the overloads that run a kernel of ours on a device type, in alphabetical order."""
    return _kernels().installed(device_type)  # type: ignore[no-any-return]


def needs_kernel(device: DeviceState, table: OpTable, dtype: torch.dtype) -> list[str]:
    """Return the overloads that the kernels there don't serve as the table says in regions of ``dtype``."""
    return _kernels().needs_kernel(device, table, dtype)  # type: ignore[no-any-return]


def native_ops(device: DeviceState) -> set[str]:
    """Return the overloads that have a kernel at the device's Autocast key that isn't ours."""
    return _kernels().native_ops(device)  # type: ignore[no-any-return]


def is_native(device: DeviceState, op: str) -> bool:
    """Tell whether an overload has a kernel at the device's Autocast key that isn't ours."""
    return _kernels().is_native(device, op)  # type: ignore[no-any-return]


def observe(observer: Callable[[Call], None]) -> Observation:
    """Have ``observer`` be given every call of an op in a region, on any thread, until the result is closed.

    It is called on the thread of the call, once the op has returned, and must not call ops of torch's. Of ops that
    the region's table doesn't list it is given the pointwise ones of torch's, and those of other libraries.
    """
    _kernels()
    return Observation(observer)


def which() -> tuple[str, str]:
    """Return the name of the engine that this process has, "python" or "compiled", and why it is that one.

    Raises:
        EngineError: ``MPAMP_ENGINE`` asks for what can't be had.
    """
    return importlib.import_module(f"{__name__}.compiled").which()  # type: ignore[no-any-return]


def build_core(*, force: bool = False) -> Path:
    """Compile the engine for the installed torch and return the library; ``mpamp build-core`` does it.

    Raises:
        EngineError: A tool is missing, or the compiler fails; nothing has changed then.
    """
    return importlib.import_module(f"{__name__}.compiled.building").build(force=force)  # type: ignore[no-any-return]


def lacking_to_build() -> list[str]:
    """Return what this machine lacks to compile the engine, a clause each."""
    return importlib.import_module(f"{__name__}.compiled.building").missing()  # type: ignore[no-any-return]
