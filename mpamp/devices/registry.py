"""The devices of this process: found when they are first asked for, and who may change their rules."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import PluginConflictError
from ..locks import LOCK, burst, turn
from ..plugins.backend import Backend
from ..probing import probing
from ..rules.optable import OpTable, Row
from .listeners import LISTENERS
from .state import DeviceState

__all__ = [
    "DeviceState",
    "device_state",
    "get_backend",
    "get_op_table",
    "is_capturing",
    "serve_by",
    "served_type",
    "set_op_rules",
]


class _ImportWatcher(importlib.abc.MetaPathFinder):
    """Notices the import of a module that puts Autocast kernels on top of ours; finds nothing itself."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        for state in devices_in_use():
            if name in state.unseen_modules:
                state.invalidate()


DEVICES: list[DeviceState] = []
"""The devices that a region has asked for so far; each one's index is its place here."""
_devices: dict[str, DeviceState] = {}
_asking: dict[tuple[str, int], DeviceState] = {}
"""Devices whose plugins are being asked for rules, by type and thread."""
_served_by: dict[str, str] = {}
"""Device types for which another stands in."""
_registered: dict[str | None, dict[str, Row]] = {}
"""Rules that single ops were registered with, by device type; None holds for every device, later ones too."""


def device_state(device_type: str) -> DeviceState:
    """Return the state of a device type; its plugin is loaded when it is first asked for.

    Raises:
        UnknownDeviceError: No backend covers it.
        PluginLoadError: Its plugin can't be loaded, or its backend fails when it is asked about itself.
        PluginConflictError: Two plugins bring it, or give one of its ops different policies.
    """
    if device_type in _served_by:
        device_type = _served_by[device_type]
    found = _devices.get(device_type)
    if found is not None:
        if found.missing_plugins:
            settle(found)
        return found
    with turn(), burst():
        asking = _asking.get((device_type, threading.get_ident()))
        if asking is not None:
            return asking
        if device_type not in _devices:
            try:
                _ask_for(device_type)
            except PluginConflictError as conflict:
                importlib.import_module("mpamp.plugins.manager").manager().in_conflict(conflict)
                raise
    for tell in LISTENERS.in_use:
        tell(device_type)
    return _devices[device_type]


def _ask_for(device_type: str) -> None:
    """Ask for all that is to be known of a device, and put it into use; runs code of plugins."""
    from ..plugins.manager import manager

    for load in LISTENERS.before_first_use:
        load()
    state = _place(_state_of(manager().backend(device_type)))
    key = (device_type, threading.get_ident())
    _asking[key] = state  # for hooks that use the device themselves
    try:
        state.add_plugin_rules(manager().op_rules(state.type, _dtypes(state)))
    finally:
        del _asking[key]
    for tell in LISTENERS.is_found:
        tell(state)
    _devices[device_type] = state
    if state.unseen_modules and not any(isinstance(f, _ImportWatcher) for f in sys.meta_path):
        sys.meta_path.insert(0, _ImportWatcher())


def _place(state: DeviceState) -> DeviceState:
    """Give a device its place among all; return the state that a plugin, or another thread, has put there meanwhile."""
    with LOCK:
        if state.type in _devices:
            return _devices[state.type]
        earlier = next((device for device in DEVICES if device.type == state.type), None)
        state.index = len(DEVICES) if earlier is None else earlier.index
        DEVICES[state.index : state.index + 1] = [state]
        state.register({**_registered.get(None, {}), **_registered.get(state.type, {})})
        return state


def _state_of(backend: Backend) -> DeviceState:
    """Ask a backend about itself; where a plugin's fails that replaces mpamp's own, that one."""
    from ..plugins.guard import interview
    from ..plugins.manager import manager

    missing = manager().pending()
    while True:
        asked = manager().asked(backend)
        try:
            with probing():
                if asked is not backend:
                    interview(asked)
                state = DeviceState(asked, settle)
        except Exception as error:
            own = manager().refuse(backend.device_type, error)
            if own is None:
                raise
            backend = own
        else:
            state.own_backend, state.missing_plugins = backend, missing
            return state


def _dtypes(state: DeviceState) -> list[torch.dtype]:
    """Return the dtypes that the device's regions run in."""
    return list(dict.fromkeys((*state.backend.lower_precision_dtypes, torch.float32)))


def settle(state: DeviceState) -> None:
    """Ask the plugins that were being imported when a device was first asked for, and aren't any more, for rules."""
    from ..plugins.manager import manager

    with turn():
        manager().load_packs()
        loaded = set(state.missing_plugins) - set(manager().pending())
        if loaded:
            state.missing_plugins = [p for p in state.missing_plugins if p not in loaded]
            state.add_plugin_rules(manager().op_rules(state.type, _dtypes(state), only=loaded))


def serve_by(device_type: str, other: str | None) -> None:
    """Have what asks for one device type be given another's state, until this is called with None."""
    if other is None:
        _served_by.pop(device_type, None)
    else:
        _served_by[device_type] = other


def served_type(device_type: str) -> str:
    """Return the device type that stands in for one; itself, where none does."""
    return _served_by.get(device_type, device_type)


def devices_in_use() -> list[DeviceState]:
    """Return the devices that a region has asked for so far."""
    return list(DEVICES)


def is_capturing(device_type: str | None = None) -> bool:
    """Tell whether the calling thread records a graph for replay: of a device type, or of any that is in use."""
    for device in devices_in_use() if device_type is None else [device_state(device_type)]:
        check = _capture_check(device.backend)
        if check is not None and check():
            return True
    return False


@functools.cache
def _capture_check(backend: Backend) -> Callable[[], bool] | None:
    """Return how a backend tells that; asked once, for it may have to count cards."""
    return backend.capture_check()


def get_backend(device: str | torch.device) -> Backend:
    """Return the backend of a device type.

    Raises:
        UnknownDeviceError: No backend covers it; the message lists the known ones.

    Example:
        >>> get_backend("xpu").default_dtype
        torch.bfloat16
    """
    return device_state(_type_of(device)).own_backend


def get_op_table(device: str | torch.device, name: str | None = None) -> OpTable:
    """Return the table in force for a device, process-wide rules included; or a named one.

    Example:
        >>> get_op_table("cpu").policy("fft_hfft2")
        <CastPolicy.FP32: 'fp32'>
    """
    state = device_state(_type_of(device))
    return state.table if name is None else OpTable.named(name, state.type)


def set_op_rules(device: str | torch.device, rules: Mapping[str, Any] | OpTable | None) -> OpTable:
    """Set the rules that every region of a device has on top of its default table, for the process.

    Replaces the rules set before; None takes them away. Regions that are open keep theirs, and code
    compiled so far is compiled anew. Returns the table in force from now on.

    Raises:
        OpTableError: A rule that is wrong; nothing has changed then.

    Example:
        >>> set_op_rules("cpu", {"gelu": "fp32"}).policy("gelu")
        <CastPolicy.FP32: 'fp32'>
        >>> set_op_rules("cpu", None).policy("gelu") is None
        True
    """
    state = device_state(_type_of(device))
    if rules is None:
        rows: dict[str, Row] = {}
    elif isinstance(rules, OpTable):
        rows = dict(state.table_for(rules))
    else:
        rows = dict(OpTable(rules, device=state.type, source="user"))
    state.set_rules(rows)
    forget_compiled_code()
    return state.table


def register_rules(device_type: str | None, rules: Mapping[str, Row]) -> None:
    """Add rules of single ops for one device type, or for all; a device's own go on top of those for all."""
    with LOCK:
        _registered.setdefault(device_type, {}).update(rules)
        for state in devices_in_use():
            if device_type in (None, state.type):
                own = _registered.get(state.type, {}) if device_type is None else {}
                state.register({op: own.get(op, row) for op, row in rules.items()})
    forget_compiled_code()


def unregister_rules(device_type: str | None, ops: list[str]) -> int:
    """Take rules of single ops back; return how many there were."""
    with LOCK:
        rules = _registered.get(device_type, {})
        gone = [op for op in ops if rules.pop(op, None) is not None]
        for state in devices_in_use():
            if device_type in (None, state.type):
                layers = (_registered.get(None, {}), _registered.get(state.type, {}))
                left = {op: layer[op] for layer in layers for op in gone if op in layer}
                state.register(left, gone)
    if gone:
        forget_compiled_code()
    return len(gone)


def forget_compiled_code() -> None:
    """Have code that was compiled under other rules be compiled anew. Takes locks of torch: not for holders of ours."""
    for tell in LISTENERS.rules_changed:
        tell()


def _type_of(device: str | torch.device) -> str:
    return device.type if isinstance(device, torch.device) else str(device).partition(":")[0]
