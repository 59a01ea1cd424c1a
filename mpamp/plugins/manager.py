"""Finds, loads, quarantines and lists plugins. In-tree backends go through the same hooks as a third party's."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import pluggy
import torch

from ..backends.base import Backend, TorchNativeBackend
from ..errors import MpampWarning, PluginConflictError, PluginLoadError, UnknownDeviceError, nearest
from ..optable import OpTable
from . import hookspecs

__all__ = ["PluginInfo", "PluginManager", "is_device_type", "manager"]

GROUP = "mpamp"
BUILTIN = {name: f"mpamp.backends.{name}" for name in ("cpu", "cuda", "xpu")}
PACK_PREFIX = "ops."
"""Entry points named ``ops.<anything>`` bring rules only, and are loaded at the first region of any device."""


@dataclass(slots=True)
class PluginInfo:
    """One plugin: where it comes from and what became of it."""

    name: str
    distribution: str
    version: str
    module: str
    status: str = "found"
    error: BaseException | None = None


class PluginManager:
    """The plugins of this process, each loaded when its device is first asked for."""

    def __init__(self, entry_points: Iterable[importlib.metadata.EntryPoint] | None = None) -> None:
        self._pm = pluggy.PluginManager(hookspecs.PROJECT)
        self._pm.add_hookspecs(hookspecs)
        self._backends: dict[str, tuple[Backend, PluginInfo | None]] = {}
        self._refused: dict[str, PluginInfo] = {}
        points = importlib.metadata.entry_points(group=GROUP) if entry_points is None else entry_points
        self._points = list(points)
        self.infos: dict[int, PluginInfo] = {i: _info(point) for i, point in enumerate(self._points)}
        blocked, allowed = _names("MPAMP_DISABLE_PLUGINS"), _names("MPAMP_LOAD_PLUGINS")
        for info in self.infos.values():
            names = {info.name, info.distribution}
            if names & blocked or "*" in blocked or (allowed and not names & allowed):
                info.status = "blocked"

    def backend(self, device_type: str) -> Backend:
        """Return the backend of a device type, loading what provides it.

        Raises:
            UnknownDeviceError: Nothing provides it.
            PluginLoadError: A plugin of that name failed to load.
            PluginConflictError: Two distributions provide it.
        """
        self._load(device_type)
        for info in self.infos.values():
            if info.name == device_type and isinstance(info.error, PluginConflictError):
                raise info.error
        if device_type in self._backends:
            return self._backends[device_type][0]
        failed = (info for info in self.infos.values() if info.name == device_type and info.error is not None)
        faulty = self._refused.get(device_type) or next(failed, None)
        if faulty is not None:
            raise _load_error(faulty, device_type) from faulty.error
        return self._native(device_type)

    def refuse(self, device_type: str, error: Exception) -> None:
        """Take back what a plugin brought for a device: its backend failed when it was asked about itself.

        Raises:
            PluginLoadError: Always, but for mpamp's own backends.
        """
        _, info = self._backends.get(device_type, (None, None))
        if info is not None:
            info.status, info.error = "failed", error
            del self._backends[device_type]
            self._refused[device_type] = info
            raise _load_error(info, device_type) from error

    def _native(self, device_type: str) -> Backend:
        key = _autocast_key_name(device_type)
        if key is None:
            known = self.known_devices()
            raise UnknownDeviceError(
                f"unknown device {device_type!r}{nearest(device_type, known)} Known devices: {', '.join(known)}. "
                f"A plugin brings another: pip install a distribution with an entry point {device_type!r} in the "
                f"group {GROUP!r}, by convention called mpamp-{device_type}."
            )
        return TorchNativeBackend(device_type, key)

    def known_devices(self) -> list[str]:
        """Return the device types that a region can be asked for."""
        found = {i.name for i in self.infos.values() if i.status != "blocked" and not i.name.startswith(PACK_PREFIX)}
        return sorted(found | set(BUILTIN) | set(self._backends))

    def _load(self, device_type: str) -> None:
        for number, point in enumerate(self._points):
            info = self.infos[number]
            if info.status == "found" and (point.name == device_type or point.name.startswith(PACK_PREFIX)):
                self._load_point(point, info)
        if device_type in BUILTIN and not self._pm.has_plugin(BUILTIN[device_type]):
            self._register(importlib.import_module(BUILTIN[device_type]), BUILTIN[device_type], None)

    def _load_point(self, point: importlib.metadata.EntryPoint, info: PluginInfo) -> None:
        info.status = "loading"  # it may use mpamp while it is imported
        try:
            module = point.load()
            needed = getattr(module, "MPAMP_API_VERSION", hookspecs.API_VERSION)
            if needed != hookspecs.API_VERSION:
                raise PluginLoadError(
                    f"{info.distribution} needs plugin API {needed}, this mpamp speaks {hookspecs.API_VERSION}; "
                    "install matching versions."
                )
            self._register(module, f"{info.distribution}:{info.name}", info)
            info.status = "loaded"
        except PluginConflictError as conflict:
            info.status, info.error = "conflict", conflict
            raise
        except (Exception, SystemExit) as error:
            info.status, info.error = "failed", error
            if os.environ.get("MPAMP_STRICT_PLUGINS") == "1":
                raise PluginLoadError(
                    f"plugin {info.name!r} of {info.distribution} failed to load: {error!r}"
                ) from error
            warnings.warn(
                f"plugin {info.name!r} of {info.distribution} {info.version} failed to load and is left out: {error!r}",
                MpampWarning,
                stacklevel=2,
            )

    def _register(self, module: ModuleType | object, name: str, info: PluginInfo | None) -> None:
        try:
            self._pm.register(module, name)
            self._pm.check_pending()
            bring: Callable[[], list[Backend] | None] = getattr(module, "mpamp_backends", list)
            backends = list(bring() or [])
            for backend in backends:
                if not isinstance(backend, Backend):
                    raise TypeError(f"mpamp_backends of {name} returned {backend!r}, not a mpamp.Backend")
            for backend in backends:
                self._claim(backend, info)
        except Exception:
            if self._pm.has_plugin(name):
                self._pm.unregister(name=name)  # none of its other hooks may be called
            self._backends = {d: claim for d, claim in self._backends.items() if info is None or claim[1] is not info}
            raise

    def _claim(self, backend: Backend, info: PluginInfo | None) -> None:
        device, owned = backend.device_type, self._backends.get(backend.device_type)
        replaces = device in BUILTIN and info is not None
        if owned is None and (not replaces or backend.replaces_builtin):
            self._backends[device] = (backend, info)
        elif info is not None:
            owner = None if owned is None else owned[1]
            other = "mpamp" if owner is None else owner.distribution
            raise PluginConflictError(
                f"device {device!r} is claimed by both {other} and {info.distribution}; uninstall one, or block one by "
                "MPAMP_DISABLE_PLUGINS. A backend that means to replace mpamp's own sets replaces_builtin = True."
            )

    def op_rules(self, device_type: str, dtypes: Iterable[torch.dtype]) -> dict[str, OpTable]:
        """Return the rules that loaded plugins bring for a device, by plugin name."""
        found: dict[str, OpTable] = {}
        for plugin, rules in self.implementations("mpamp_op_rules"):
            try:
                by_dtype = {d: rules(device_type=device_type, dtype=d) or {} for d in dtypes}
                ops = sorted({op for rules_of_one in by_dtype.values() for op in rules_of_one})
                merged = {op: {d: r[op] for d, r in by_dtype.items() if op in r} for op in ops}
                table = OpTable(merged, device=device_type, source=plugin)
            except Exception as error:
                self.leave_out(plugin, f"rules for {device_type}", error)
                continue
            if table:
                found[plugin] = table
        return found

    def implementations(self, hook: str) -> list[tuple[str, Callable[..., Any]]]:
        """Return the loaded plugins that implement a hook; what does it takes the hook's arguments, by name."""
        impls: list[pluggy.HookImpl] = getattr(self._pm.hook, hook).get_hookimpls()
        return [(impl.plugin_name, functools.partial(_call, impl)) for impl in impls]

    def leave_out(self, plugin: str, part: str, error: Exception) -> None:
        """Say that a part of a loaded plugin failed, and is left out.

        Raises:
            PluginLoadError: MPAMP_STRICT_PLUGINS is 1.
        """
        for info in self.infos.values():
            if plugin == f"{info.distribution}:{info.name}":
                info.status, info.error = "failed", error
        message = f"the {part} of plugin {plugin!r} are left out: {error}"
        if os.environ.get("MPAMP_STRICT_PLUGINS") == "1":
            raise PluginLoadError(message) from error
        warnings.warn(message, MpampWarning, stacklevel=2)

    def hook(self) -> Any:
        """Return pluggy's hook caller, for hooks that are notified."""
        return self._pm.hook

    def listing(self) -> list[PluginInfo]:
        """Return every plugin found, built-in ones first."""
        from .._version import __version__

        builtin = [
            PluginInfo(n, "mpamp", __version__, m, "loaded" if self._pm.has_plugin(m) else "built-in")
            for n, m in BUILTIN.items()
        ]
        return [*builtin, *self.infos.values()]


def _load_error(info: PluginInfo, device_type: str) -> PluginLoadError:
    return PluginLoadError(
        f"the plugin for device {device_type!r} ({info.distribution} {info.version}) failed to load: {info.error!r}. "
        f"Mend or uninstall {info.distribution}."
    )


def _call(impl: pluggy.HookImpl, **arguments: Any) -> Any:
    """Call a hook's implementation, which may leave arguments out."""
    function = cast(Callable[..., Any], impl.function)
    return function(**{name: value for name, value in arguments.items() if name in impl.argnames})


def _info(point: importlib.metadata.EntryPoint) -> PluginInfo:
    dist = getattr(point, "dist", None)
    name, version = (dist.name, dist.version) if dist is not None else ("unknown", "?")
    return PluginInfo(point.name, name, version, point.value)


def _names(variable: str) -> set[str]:
    return {n.strip() for n in os.environ.get(variable, "").split(",") if n.strip()}


def _autocast_key_name(device_type: str) -> str | None:
    if not is_device_type(device_type) or not torch.amp.is_autocast_available(device_type):
        return None
    if device_type == torch._C._get_privateuse1_backend_name():
        return "AutocastPrivateUse1"
    return f"Autocast{device_type.upper()}"


def is_device_type(name: str) -> bool:
    """Tell whether torch knows a device type of that name."""
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True


@functools.cache
def manager() -> PluginManager:
    """Return this process's plugin manager."""
    return PluginManager()
