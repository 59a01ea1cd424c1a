"""One device type in this process: its backend, its table now, and the layers of rules that the table is made of."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..errors import OpTableError, PluginConflictError, PluginLoadError
from ..locks import LOCK, turn
from ..plugins.backend import Backend
from ..rules.eligibility import find_overload
from ..rules.optable import ANY_DEVICE, OpTable, Row
from .fallthroughs import registrations
from .keys import autocast_key

__all__ = ["DeviceState"]

_versions = itertools.count(1)


class DeviceState:
    """One device type in this process: its backend, its Autocast key and its tables."""

    def __init__(self, backend: Backend, settle: Callable[[DeviceState], None]) -> None:
        self.settle = settle
        """Asks the plugins that are still missing for their rules."""
        self.own_backend = backend
        """The backend itself. ``backend`` is what mpamp asks: it names the plugin in whatever is raised."""
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
        self.registered_rules: dict[str, Row] = {}
        """Of single ops, those for every device included."""
        self.rules_of_plugins: dict[str, Row] = {}
        self._plugins: dict[str, OpTable] = {}
        self.missing_plugins: list[str] = []
        """Plugins that were being imported when the device was first asked for: their rules are still to come."""
        self.base: OpTable
        """The backend's table, and rows without a policy for kernels that it doesn't know."""
        self._table: OpTable | None = None
        self._is_prepared = False
        self.ask(backend)

    def ask(self, backend: Backend) -> None:
        """Go by what a backend says from now on.

        Raises:
            TypeError: One of its dtypes isn't one, or its table is none.
        """
        for dtype in (backend.default_dtype, *backend.lower_precision_dtypes):
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"a dtype of {backend!r} is {dtype!r}, not a torch.dtype.")
        table = backend.op_table()
        if not isinstance(table, OpTable):
            raise TypeError(f"op_table() of {backend!r} is {table!r}, not a mpamp.OpTable.")
        with LOCK:
            rows = {**table, **_unlisted(self.key_name, table)}
            self.backend, self.base = backend, OpTable.from_rows(rows, name=table.name, device=self.type)
            self._is_prepared = False
            self._change()

    def prepare(self) -> None:
        """Have the backend do what must come before the first kernel is installed; once.

        Raises:
            PluginLoadError: A plugin's backend failed. Where it stood for mpamp's own, that one is used instead.
        """
        if self.missing_plugins:
            self.settle(self)
        while not self._is_prepared:
            with turn():
                if not self._is_prepared:
                    self._prepare()

    def _prepare(self) -> None:
        from ..plugins.manager import manager

        try:
            self.backend.prepare()
        except PluginLoadError as error:
            own = manager().refuse(self.type, error)
            if own is None:
                raise
            self.own_backend = own
            self.ask(own)
        else:
            self._is_prepared = True

    # -- Regions that need to ask nothing ----------------------------------------------------------------

    def see_modules(self) -> list[str]:
        """Return the watched modules that were imported since the last call."""
        seen = [m for m in self.unseen_modules if _is_imported(m)]
        self.has_vendor_kernels = self.has_vendor_kernels or bool(seen)
        self.unseen_modules = tuple(m for m in self.unseen_modules if m not in seen)
        return seen

    def is_being_overtaken(self) -> bool:
        """Tell whether a watched module, or a plugin with rules, is being imported or was since it was looked at."""
        return bool(self.missing_plugins) or any(m in sys.modules for m in self.unseen_modules)

    def invalidate(self) -> None:
        """Have every region of the device ask again, before it is next entered, what it needs."""
        self.version = next(_versions)

    # -- Rules -------------------------------------------------------------------------------------------

    @property
    def table(self) -> OpTable:
        """The device's default table now: made when it is first asked for after a change."""
        table = self._table
        if table is None:
            with LOCK:
                table = self._table = self._made()
        return table

    def _made(self) -> OpTable:
        table = self.base
        layers = (
            (self.rules_of_plugins, "plugins"),
            (self.registered_rules, "registered"),
            (self.user_rules, "user"),
        )
        for rows, name in layers:
            if rows:
                extra = OpTable.from_rows(rows, name=name, device=self.type)
                table = table.override(extra, name=f"{table.name}+{name}")
        return table

    def _change(self) -> None:
        self._table = None
        self.invalidate()

    def set_rules(self, rules: dict[str, Row]) -> None:
        """Replace the user's process-wide rules."""
        with LOCK:
            self.user_rules = rules
            self._change()

    def register(self, rules: Mapping[str, Row], gone: Iterable[str] = ()) -> None:
        """Add rules of single ops, and take some away."""
        with LOCK:
            for op in gone:
                self.registered_rules.pop(op, None)
            self.registered_rules.update(rules)
            self._change()

    def add_plugin_rules(self, rules: Mapping[str, OpTable]) -> None:
        """Merge the rules that plugins bring, by plugin name, with those there are.

        Raises:
            PluginConflictError: Two plugins give one op different policies; nothing has changed then.
        """
        with LOCK:
            plugins = {**self._plugins, **rules}
            if plugins == self._plugins:
                return
            self.rules_of_plugins = _merged(self.type, plugins)
            self._plugins = plugins
            self._change()

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


def _merged(device_type: str, plugins: Mapping[str, OpTable]) -> dict[str, Row]:
    merged: dict[str, Row] = {}
    for plugin, table in plugins.items():
        for op, row in table.items():
            other = merged.get(op)
            decided = dict(() if other is None else other.by_dtype)
            if other is not None and any(decided.get(dtype, policy) is not policy for dtype, policy in row.by_dtype):
                conflict = PluginConflictError(
                    f"{op} on {device_type}: {other.source} says {other}, {plugin} says {row}. "
                    "Uninstall or block one of them (MPAMP_DISABLE_PLUGINS)."
                )
                conflict.plugins = (other.source, plugin)
                raise conflict
            merged[op] = Row(row.policy, row.by_dtype, plugin).over(other)
    return merged


def _unlisted(key_name: str, table: OpTable) -> dict[str, Row]:
    """Return a row without a policy for each kernel that torch, or a vendor, has and the table doesn't know."""
    return {
        n: Row(None, (), "torch") for n in registrations(key_name) if n not in table and find_overload(n) is not None
    }


def _is_imported(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)
