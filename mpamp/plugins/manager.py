"""Loads, quarantines and lists plugins. In-tree backends go through the same hooks as a third party's.

Whatever a plugin raises, ``SystemExit`` and a ``BaseException`` of its own too, is named and leaves that plugin out,
or the hook of it that raised; only ``KeyboardInterrupt`` goes through, for it is the user's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, cast

import pluggy
import torch

from ..errors import MpampError, MpampWarning, PluginConflictError, PluginLoadError, UnknownDeviceError, nearest, shown
from ..locks import turn
from ..rules.optable import OpTable
from ..torch_internals import get_privateuse1_backend_name
from . import found as _found
from . import hookspecs
from .backend import Backend, TorchNativeBackend
from .found import GROUP, EntryPoint, PluginInfo
from .guard import guarded
from .leftovers import no_region_left

__all__ = ["PluginInfo", "PluginManager", "is_device_type", "manager"]

BUILTIN = {name: f"mpamp.backends.{name}" for name in ("cpu", "cuda", "xpu")}
HOOKS = [name for name in vars(hookspecs) if name.startswith("mpamp_")]


class _Hooks(pluggy.PluginManager):
    """Takes a function that has a hook's name for one that is marked as such."""

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        options = super().parse_hookimpl_opts(plugin, name)
        if options is None and name in HOOKS:
            function = getattr(plugin, name)
            is_ours = hasattr(function, f"{hookspecs.PROJECT}_spec")
            return {} if inspect.isroutine(function) and not is_ours else None
        if options is not None and (options.get("wrapper") or options.get("hookwrapper")):
            raise TypeError(f"{name} is a hook wrapper: mpamp calls each plugin's hooks by themselves.")
        return options


class PluginManager:
    """The plugins of this process, each loaded when its device is first asked for."""

    def __init__(self, entry_points: Iterable[EntryPoint] | None = None) -> None:
        self._pm = _Hooks(hookspecs.PROJECT)
        self._pm.add_hookspecs(hookspecs)
        self._backends: dict[str, tuple[Backend, PluginInfo | None]] = {}
        self._refused: dict[str, tuple[str, BaseException | None]] = {}
        self._left_out: set[tuple[str, str]] = set()
        """Plugins and the hooks of theirs that aren't called any more."""
        self._points = _found.entry_points() if entry_points is None else list(entry_points)
        self.infos = _found.find(self._points)

    # -- Backends --------------------------------------------------------------------------------------

    def backend(self, device_type: str) -> Backend:
        """Return the backend of a device type, loading what provides it.

        Raises:
            UnknownDeviceError: Nothing provides it.
            PluginLoadError: A plugin of that name failed to load.
            PluginConflictError: Two distributions provide it.
        """
        self._load(device_type)
        for info in self.infos.values():
            named = info.claims if info.is_pack else (info.name,)
            if isinstance(info.error, PluginConflictError) and info.status == "conflict" and device_type in named:
                raise info.error
        if device_type in self._backends:
            return self._backends[device_type][0]
        if device_type in self._refused:
            message, cause = self._refused[device_type]
            raise PluginLoadError(message) from cause
        for info in self.infos.values():
            if info.name == device_type and info.error is not None:
                raise PluginLoadError(_load_error(info, device_type)) from info.error
        return self._native(device_type)

    def asked(self, backend: Backend) -> Backend:
        """Return a backend as mpamp asks it: what a plugin's raises names the plugin, and is kept in its listing."""
        info = next((i for b, i in self._backends.values() if b is backend), None)
        if info is None:
            return backend
        return guarded(backend, functools.partial(self._note, info, backend.device_type))

    def _note(self, info: PluginInfo, device_type: str, asked: str, error: BaseException) -> str:
        info.status, info.error = "failed", error
        return f"{_whose(info, device_type)} failed: its {asked} raised {shown(error)}. {_remedy(info)}"

    def require_known(self, backend: Backend) -> None:
        """Check that torch has the device of a backend.

        Raises:
            UnknownDeviceError: It hasn't; it may be given the device later.
        """
        device_type = backend.device_type
        if is_device_type(device_type):
            return
        info = next((i for b, i in self._backends.values() if b is backend), None)
        owner = "its backend is there" if info is None else f"{_whose(info, device_type)} is loaded"
        raise UnknownDeviceError(
            f"torch knows no device {device_type!r}, though {owner}. A plugin names its device to torch before "
            f"mpamp_backends() returns, by importing the vendor's package or by "
            f"torch.utils.rename_privateuse1_backend({device_type!r}) and torch._register_device_module."
        )

    def refuse(self, device_type: str, error: BaseException) -> Backend | None:
        """Take back what a plugin brought for a device: its backend failed when it was asked about itself.

        Returns what takes its place: mpamp's own backend, with a warning, where the plugin's stood for it. None if
        it is mpamp's own that failed.

        Raises:
            PluginLoadError: Nothing takes its place; or MPAMP_STRICT_PLUGINS is 1.
        """
        _, info = self._backends.get(device_type, (None, None))
        if info is None:
            return None
        del self._backends[device_type]
        if not isinstance(error, PluginLoadError):  # a guarded one says it already
            info.status, info.error = "failed", error
        cause = error.__cause__ if isinstance(error, PluginLoadError) else error
        message = str(error) if isinstance(error, PluginLoadError) else _load_error(info, device_type)
        if device_type not in BUILTIN:
            self._refused[device_type] = message, cause
            raise PluginLoadError(message) from cause
        self._complain(f"{message} mpamp's own is used.", cause)
        for own in importlib.import_module(BUILTIN[device_type]).mpamp_backends():
            self._backends[own.device_type] = (own, None)
        return self._backends[device_type][0]

    def _native(self, device_type: str) -> Backend:
        key = _autocast_key_name(device_type)
        if key is None:
            known = self.known_devices()
            raise UnknownDeviceError(
                f"unknown device {device_type!r}{nearest(device_type, known)} Known devices: {', '.join(known)}. "
                f"A plugin brings another: pip install a distribution with an entry point {device_type!r} in the "
                f"group {GROUP!r}, by convention called mpamp-{device_type}.{self._blocked()}"
            )
        return TorchNativeBackend(device_type, key)

    def _blocked(self) -> str:
        names = [f"{i.name} of {i.distribution}" for i in self.infos.values() if i.status == "blocked"]
        variables = [v for v in (_found.DISABLE, _found.LOAD) if os.environ.get(v)]
        return f" Blocked by {' and '.join(variables)}: {', '.join(names)}." if names else ""

    def known_devices(self) -> list[str]:
        """Return the device types that a region can be asked for."""
        named = {i.name for i in self.infos.values() if i.status != "blocked" and not i.is_pack}
        return sorted(named | set(BUILTIN) | set(self._backends))

    # -- Loading ---------------------------------------------------------------------------------------

    def _load(self, device_type: str) -> None:
        for number, point in enumerate(self._points):
            info = self.infos[number]
            if info.name != device_type and not info.is_pack:
                continue
            if info.status == "found":
                self._load_point(point, info)
            elif info.error is not None and info.is_pack and _is_strict():
                if isinstance(info.error, PluginConflictError):
                    raise info.error
                raise _strict_error(info, info.error) from info.error
        if device_type in BUILTIN and not self._pm.has_plugin(BUILTIN[device_type]):
            self._register(importlib.import_module(BUILTIN[device_type]), BUILTIN[device_type], None)

    def pending(self) -> list[str]:
        """Return the plugins whose rules are still to come: they are being imported, here or on another thread."""
        return [i.key for i in self.infos.values() if i.status == "loading" or (i.status == "found" and i.is_pack)]

    def load_packs(self) -> None:
        """Load the plugins that any device needs and that aren't yet."""
        for number, point in enumerate(self._points):
            if self.infos[number].is_pack and self.infos[number].status == "found":
                self._load_point(point, self.infos[number])

    def _load_point(self, point: EntryPoint, info: PluginInfo) -> None:
        info.status = "loading"  # it may use mpamp while it is imported
        try:
            with no_region_left():
                module = point.load()
                if _is_partial(info):
                    info.status = "found"
                    return
                self._take_in(module, info)
            info.status = "loaded"
        except KeyboardInterrupt:
            info.status = "found"
            raise
        except PluginConflictError as conflict:
            info.status, info.error = "conflict", conflict
            if info.is_pack:
                self._complain(f"plugin {info.name!r} of {info.distribution} is left out: {conflict}", conflict)
        except BaseException as error:
            if _is_partial(info):  # what the entry point names is not there yet
                info.status = "found"
                return
            info.status, info.error = "failed", error
            if _is_strict():
                raise _strict_error(info, error) from error
            warnings.warn(
                f"plugin {info.name!r} of {info.distribution} {info.version} failed to load and is left out: "
                f"{shown(error)}",
                MpampWarning,
                stacklevel=2,
            )

    def _take_in(self, module: Any, info: PluginInfo) -> None:
        needed = getattr(module, "MPAMP_API_VERSION", hookspecs.API_VERSION)
        if needed != hookspecs.API_VERSION:
            raise PluginLoadError(
                f"{info.distribution} needs plugin API {needed}, this mpamp speaks {hookspecs.API_VERSION}; "
                "install matching versions."
            )
        self._register(module, info.key, info)

    def _register(self, module: ModuleType | object, name: str, info: PluginInfo | None) -> None:
        try:
            self._pm.register(module, name)
            self._pm.check_pending()
            bring = [function for plugin, function in self.implementations("mpamp_backends") if plugin == name]
            backends = [backend for function in bring for backend in function() or []]
            for backend in backends:
                if not isinstance(backend, Backend):
                    raise TypeError(f"mpamp_backends of {name} returned {backend!r}, not a mpamp.Backend")
                for attribute in ("device_type", "autocast_key"):
                    if not isinstance(getattr(backend, attribute), str):
                        raise TypeError(f"{attribute} of {backend!r} is {getattr(backend, attribute)!r}, not a str.")
            if info is not None:
                info.claims = tuple(backend.device_type for backend in backends)
            for backend in backends:
                self._claim(backend, info)
        except BaseException:
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

    # -- Hooks -----------------------------------------------------------------------------------------

    def op_rules(
        self, device_type: str, dtypes: Iterable[torch.dtype], only: Container[str] | None = None
    ) -> dict[str, OpTable]:
        """Return the rules that loaded plugins, or ``only`` some of them, bring for a device, by plugin name."""
        asked = self.implementations("mpamp_op_rules")
        tables: dict[str, OpTable] = {}
        for plugin, rules in asked if only is None else [pair for pair in asked if pair[0] in only]:
            with self.leaving_out(plugin, "mpamp_op_rules", f"rules for {device_type}"), no_region_left():
                by_dtype = {d: _rules(rules(device_type=device_type, dtype=d), d) for d in dtypes}
                ops = sorted({op for rules_of_one in by_dtype.values() for op in rules_of_one})
                merged = {op: {d: r[op] for d, r in by_dtype.items() if op in r} for op in ops}
                table = OpTable(merged, device=device_type, source=plugin)
                if table:
                    tables[plugin] = table
        return tables

    def first(self, hook: str, kind: type, part: str, **arguments: Any) -> Any:
        """Return the first result of a hook that isn't None; a plugin whose result isn't of a kind is left out."""
        for plugin, function in reversed(self.implementations(hook)):
            with self.leaving_out(plugin, hook, part):
                result = function(**arguments)
                if isinstance(result, kind):
                    return result
                if result is not None:
                    wanted = f"{kind.__module__}.{kind.__qualname__}"
                    raise TypeError(f"{hook} returned {result!r}, not an instance of {wanted}.")
        return None

    def tell(self, hook: str, part: str, **arguments: Any) -> None:
        """Call a hook of every plugin; one that raises isn't told again."""
        for plugin, function in reversed(self.implementations(hook)):
            with self.leaving_out(plugin, hook, part):
                function(**arguments)

    def add(self, plugin: object, name: str) -> None:
        """Call the hooks of an object too, which came with no entry point and brings no backend."""
        self._pm.register(plugin, name)

    def remove(self, name: str) -> None:
        """Call them no more; nothing happens if there is no such object."""
        if self._pm.has_plugin(name):
            self._pm.unregister(name=name)

    def implementations(self, hook: str) -> list[tuple[str, Callable[..., Any]]]:
        """Return the loaded plugins that implement a hook; what does it takes the hook's arguments, by name."""
        impls: list[pluggy.HookImpl] = getattr(self._pm.hook, hook).get_hookimpls()
        called = [impl for impl in impls if (impl.plugin_name, hook) not in self._left_out]
        return [(impl.plugin_name, functools.partial(_call, impl)) for impl in called]

    @contextlib.contextmanager
    def leaving_out(self, plugin: str, hook: str, part: str) -> Iterator[None]:
        """Call a hook of a plugin inside: if it raises, or leaves a region open, it isn't called any more.

        Raises:
            PluginLoadError: It did, and MPAMP_STRICT_PLUGINS is 1.
        """
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.leave_out(plugin, hook, part, error)

    def leave_out(self, plugin: str, hook: str, part: str, error: BaseException) -> None:
        """Call a hook of a plugin no more, and say so."""
        self._left_out.add((plugin, hook))
        for info in self.infos.values():
            if plugin == info.key:
                info.status, info.error = "conflict" if isinstance(error, PluginConflictError) else "failed", error
        reason = error if isinstance(error, MpampError) else shown(error)
        self._complain(f"the {part} of plugin {plugin!r} are left out: {reason}", error)

    def in_conflict(self, conflict: PluginConflictError) -> None:
        """Keep in the listing that the rules of two plugins differ."""
        for info in self.infos.values():
            if info.key in conflict.plugins:
                info.status, info.error = "conflict", conflict

    def _complain(self, message: str, error: BaseException | None) -> None:
        if _is_strict():
            raise PluginLoadError(message) from error
        warnings.warn(message, MpampWarning, stacklevel=2)

    def listing(self) -> list[PluginInfo]:
        """Return every plugin found, built-in ones first."""
        from .._version import __version__

        builtin = [
            PluginInfo(n, "mpamp", __version__, m, "loaded" if self._pm.has_plugin(m) else "built-in")
            for n, m in BUILTIN.items()
        ]
        return [*builtin, *self.infos.values()]


def _whose(info: PluginInfo, device_type: str) -> str:
    return f"the plugin for device {device_type!r} ({info.distribution} {info.version})"


def _remedy(info: PluginInfo) -> str:
    return f"Mend or uninstall {info.distribution}."


def _load_error(info: PluginInfo, device_type: str) -> str:
    cause = "" if info.error is None else f": {shown(info.error)}"
    return f"{_whose(info, device_type)} failed to load{cause}. {_remedy(info)}"


def _strict_error(info: PluginInfo, error: BaseException) -> PluginLoadError:
    return PluginLoadError(f"plugin {info.name!r} of {info.distribution} failed to load: {shown(error)}")


def _is_partial(info: PluginInfo) -> bool:
    """Tell whether a plugin's module is only half imported: its own body, or what that imports, has asked for it."""
    module = sys.modules.get(info.module.partition(":")[0].strip())
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _is_strict() -> bool:
    return os.environ.get("MPAMP_STRICT_PLUGINS") == "1"


def _rules(result: Any, dtype: torch.dtype) -> Mapping[str, Any]:
    """Return what a hook gave as rules of one dtype."""
    if result is None:
        return {}
    if not isinstance(result, Mapping):
        raise TypeError(f"mpamp_op_rules returned {result!r}, not a mapping from op to policy.")
    if isinstance(result, OpTable):
        return {op: policy for op, row in result.items() if (policy := row.at(dtype)) is not None}
    return result


def _call(impl: pluggy.HookImpl, **arguments: Any) -> Any:
    """Call a hook's implementation, which may leave arguments out."""
    function = cast(Callable[..., Any], impl.function)
    return function(**{name: value for name, value in arguments.items() if name in impl.argnames})


def _autocast_key_name(device_type: str) -> str | None:
    if not is_device_type(device_type) or not torch.amp.is_autocast_available(device_type):
        return None
    if device_type == get_privateuse1_backend_name():
        return "AutocastPrivateUse1"
    return f"Autocast{device_type.upper()}"


def is_device_type(name: str) -> bool:
    """Tell whether torch knows a device type of that name."""
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True


_manager: PluginManager | None = None


def manager() -> PluginManager:
    """Return this process's plugin manager."""
    global _manager
    if _manager is None:
        with turn():
            if _manager is None:
                _manager = PluginManager()
    return _manager
