"""The devices of this process: each one's backend, its table now, and who may change it."""

from __future__ import annotations

import importlib.abc
import itertools
import sys
import threading
from collections.abc import Mapping
from typing import Any

import torch

from .backends.base import Backend
from .eligibility import find_overload
from .errors import OpTableError, PluginConflictError
from .marks import autocast_key, forget_compiled_code, retire_carrier
from .optable import ANY_DEVICE, OpTable, Row
from .scope import DEVICES

__all__ = ["DeviceState", "device_state", "get_backend", "get_op_table", "set_op_rules"]


_versions = itertools.count(1)


class DeviceState:
    """One device type in this process: its backend, its Autocast key and its tables."""

    def __init__(self, backend: Backend) -> None:
        self.backend: Backend
        self.type = backend.device_type
        self.key = autocast_key(backend.autocast_key)
        self.key_name = backend.autocast_key
        self.index = -1
        """The device's place in each thread's list of scopes, once it is in use."""
        self.version = 0
        """Goes up after each change of the default table or the kernels: what was read before it may be of before."""
        self.unseen_modules = backend.watched_modules
        """Modules that would put Autocast kernels on top of ours when imported, and haven't been yet."""
        self.has_vendor_kernels = False
        """Whether the kernels under ours may be another's than torch's, with policies of their own."""
        self.see_modules()
        self.user_rules: dict[str, Row] = {}
        self.rules_of_plugins: dict[str, Row] = {}
        self.base: OpTable
        """The backend's table, and rows without a policy for kernels that it doesn't know."""
        self.table: OpTable
        self.ask(backend)

    def ask(self, backend: Backend) -> None:
        """Go by what a backend says from now on.

        Raises:
            TypeError: One of its dtypes isn't one.
        """
        for dtype in (backend.default_dtype, *backend.lower_precision_dtypes):
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"a dtype of {backend!r} is {dtype!r}, not a torch.dtype.")
        table = backend.op_table()
        rows = {**table, **_unlisted(self.key_name, table)}
        self.backend, self.base = backend, OpTable.from_rows(rows, name=table.name, device=self.type)
        self._apply()

    def see_modules(self) -> list[str]:
        """Return the watched modules that were imported since the last call."""
        seen = [m for m in self.unseen_modules if _is_imported(m)]
        self.has_vendor_kernels = self.has_vendor_kernels or bool(seen)
        self.unseen_modules = tuple(m for m in self.unseen_modules if m not in seen)
        return seen

    def is_being_overtaken(self) -> bool:
        """Tell whether a watched module is being imported, or has been since they were last looked at."""
        return any(m in sys.modules for m in self.unseen_modules)

    def invalidate(self) -> None:
        """Have every region of the device ask again, before it is next entered, what it needs."""
        self.version = next(_versions)

    def _apply(self) -> None:
        table = self.base
        registered = {**_registered.get(None, {}), **_registered.get(self.type, {})}
        layers = ((self.rules_of_plugins, "plugins"), (registered, "registered"), (self.user_rules, "user"))
        for rows, name in layers:
            if rows:
                extra = OpTable.from_rows(rows, name=name, device=self.type)
                table = table.override(extra, name=f"{table.name}+{name}")
        self.table = table
        self.invalidate()

    def set_rules(self, rules: dict[str, Row]) -> None:
        """Replace the user's process-wide rules."""
        self.user_rules = rules
        self._apply()
        _forget_compiled_code()

    def add_plugin_rules(self, rules: Mapping[str, OpTable]) -> None:
        """Merge the rules that plugins bring, by plugin name.

        Raises:
            PluginConflictError: Two plugins give one op different policies.
        """
        merged: dict[str, Row] = {}
        for plugin, table in rules.items():
            for op, row in table.items():
                other = merged.get(op)
                decided = dict(() if other is None else other.by_dtype)
                if other is not None and any(
                    decided.get(dtype, policy) is not policy for dtype, policy in row.by_dtype
                ):
                    raise PluginConflictError(
                        f"{op} on {self.type}: {other.source} says {other}, {plugin} says {row}. "
                        "Uninstall or block one of them (MPAMP_DISABLE_PLUGINS)."
                    )
                merged[op] = Row(row.policy, row.by_dtype, plugin).over(other)
        self.rules_of_plugins = merged
        self._apply()

    def table_for(self, ops: Mapping[str, Any] | OpTable) -> OpTable:
        """Return the table of a region with these ``ops=``.

        Raises:
            OpTableError: A table for another device, or a rule that is wrong.
        """
        if isinstance(ops, OpTable):
            if ops.device not in (ANY_DEVICE, self.type):
                raise OpTableError(f"table {ops.name!r} is for device {ops.device!r}, the region for {self.type!r}.")
            return ops
        if not isinstance(ops, Mapping):
            raise OpTableError(f"ops= takes a mapping from op to policy, or an OpTable; got {type(ops).__name__}.")
        return self.table.override(ops, source="region")


def _unlisted(key_name: str, table: OpTable) -> dict[str, Row]:
    """Return a row without a policy for each kernel that torch, or a vendor, has and the table doesn't know."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key_name)
    return {n: Row(None, (), "torch") for n in names if n not in table and find_overload(n) is not None}


def _is_imported(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


class _ImportWatcher(importlib.abc.MetaPathFinder):
    """Notices the import of a module that puts Autocast kernels on top of ours; finds nothing itself."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        for state in devices_in_use():
            if name in state.unseen_modules:
                state.invalidate()


_devices: dict[str, DeviceState] = {}
_registered: dict[str | None, dict[str, Row]] = {}
"""Rules that single ops were registered with, by device type; None holds for every device, later ones too."""
_lock = threading.RLock()


def device_state(device_type: str) -> DeviceState:
    """Return the state of a device type; its plugin is loaded when it is first asked for.

    Raises:
        UnknownDeviceError: No backend covers it.
        PluginLoadError: Its plugin can't be loaded, or its backend fails when it is asked for its table.
    """
    found = _devices.get(device_type)
    if found is not None:
        return found
    from .plugins.manager import manager

    with _lock:
        if device_type not in _devices:
            backend = manager().backend(device_type)
            try:
                state = DeviceState(backend)
            except Exception as error:
                manager().refuse(device_type, error)
                raise
            retire_carrier(device_type)
            rules = manager().op_rules(state.type, state.backend.lower_precision_dtypes)
            if rules:
                state.add_plugin_rules(rules)
            if state.unseen_modules and not any(isinstance(f, _ImportWatcher) for f in sys.meta_path):
                sys.meta_path.insert(0, _ImportWatcher())
            state.index = len(DEVICES)  # not before: a plugin's hooks may have asked for other devices
            DEVICES.append(state)
            _devices[device_type] = state
    return _devices[device_type]


def devices_in_use() -> list[DeviceState]:
    """Return the devices that a region has asked for so far."""
    return list(DEVICES)


def get_backend(device: str | torch.device) -> Backend:
    """Return the backend of a device type.

    Raises:
        UnknownDeviceError: No backend covers it; the message lists the known ones.

    Example:
        >>> get_backend("xpu").default_dtype
        torch.bfloat16
    """
    return device_state(_type_of(device)).backend


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
    with _lock:
        state.set_rules(rows)
    return state.table


def registered_rules(device_type: str | None) -> dict[str, Row]:
    """Return the rules that single ops were registered with for one device type, or for all."""
    return dict(_registered.get(device_type, {}))


def set_registered_rules(device_type: str | None, rules: dict[str, Row]) -> None:
    """Replace them."""
    with _lock:
        _registered[device_type] = rules
        for state in devices_in_use():
            if device_type in (None, state.type):
                state.set_rules(state.user_rules)


def _type_of(device: str | torch.device) -> str:
    return device.type if isinstance(device, torch.device) else str(device).partition(":")[0]


def _forget_compiled_code() -> None:
    forget_compiled_code()
    from .kernels import tag_compiler_caches

    tag_compiler_caches()
