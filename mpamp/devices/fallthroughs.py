"""Letting ops through at an Autocast key that has no fallback (PrivateUse1, HPU, IPU, XLA): calls would raise there.

Op by op, and never by a fallback for the whole key: torch takes one of those for each key, and a C++ library that
registers another as it is loaded, as vendors' do, ends the process. Kernels go on top of these, whoever's they are.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..torch_internals import (
    DispatchKey,
    OpNamespace,
    dispatch_get_all_op_names,
    dispatch_get_registrations_for_dispatch_key,
    dispatch_has_backend_fallback,
    dispatch_has_kernel_for_dispatch_key,
    dispatch_kernel_for_dispatch_key_is_fallthrough,
    dispatch_key_name,
)

__all__ = ["has_kernel", "let_through", "let_through_new", "registrations"]


class _Key:
    """The ops that are let through at one key."""

    def __init__(self, key: DispatchKey) -> None:
        self.key, self.name = key, dispatch_key_name(key)
        self.libraries: dict[str, torch.library.Library] = {}
        self.ops: set[str] = set()
        self.seen: set[str] = set()
        """All ops that were looked at, those with kernels too."""

    def take(self, ops: Iterable[str]) -> None:
        """Let those through that have no kernel."""
        for op in ops:
            self.seen.add(op)
            if not dispatch_has_kernel_for_dispatch_key(op, self.key):
                self._put(op)

    def _put(self, op: str) -> None:
        namespace, _, name = op.partition("::")
        library = self.libraries.get(namespace)
        if library is None:
            library = self.libraries[namespace] = torch.library.Library(namespace, "IMPL")
        assert library.m is not None
        library.m.impl(name, self.name, torch.library.fallthrough_kernel, False)
        self.ops.add(op)

    def warn_once(self) -> None:
        """Spend torch's one warning that a kernel goes over another: it isn't about those that go over these."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*[Oo]verriding a previously registered kernel")
            self._put("aten::mm")

    def is_only_let_through(self, op: str) -> bool:
        """Tell whether an op has no kernel here."""
        return op in self.ops and dispatch_kernel_for_dispatch_key_is_fallthrough(op, self.key)


_keys: dict[str, _Key] = {}


def let_through(key: DispatchKey) -> None:
    """Let every op through that has no kernel at an Autocast key, later ones too, unless the key has a fallback."""
    name = dispatch_key_name(key)
    if name in _keys or dispatch_has_backend_fallback(key):
        return
    found = _Key(key)
    found.take(dispatch_get_all_op_names())
    found.warn_once()
    _keys[name] = found
    _watch_namespaces()


def let_through_new(op: str | None = None) -> None:
    """Let through what has been defined since: one op, or, by default, whichever there are."""
    for key in list(_keys.values()):
        if dispatch_has_backend_fallback(key.key):  # of a vendor's library that was loaded since
            continue
        # No lock: a module may look for its ops while it is imported. Two threads may do the same, to no harm.
        key.take([op] if op is not None else set(dispatch_get_all_op_names()) - key.seen)


@functools.cache
def _watch_namespaces() -> None:
    """Look for new ops where ``torch.ops.<namespace>.<op>`` is first asked for: C++ libraries tell nobody of theirs."""
    namespace: Any = OpNamespace
    original: Callable[[Any, str], Any] = namespace.__getattr__

    @functools.wraps(original)
    def find(self: Any, name: str) -> Any:
        packet = original(self, name)
        if any(_is_new(f"{self.name}::{name}", packet, key) for key in list(_keys.values())):
            let_through_new()
        return packet

    namespace.__getattr__ = find


def _is_new(op: str, packet: Any, key: _Key) -> bool:
    names = (op if overload == "default" else f"{op}.{overload}" for overload in packet.overloads())
    return any(name not in key.seen for name in names)


def has_kernel(op: str, key: DispatchKey) -> bool:
    """Tell whether an op has a kernel at an Autocast key.

    Example:
        >>> from mpamp.devices.keys import autocast_key
        >>> has_kernel("aten::mm", autocast_key("AutocastCPU")), has_kernel("aten::relu", autocast_key("AutocastCPU"))
        (True, False)
    """
    if not dispatch_has_kernel_for_dispatch_key(op, key):
        return False
    found = _keys.get(dispatch_key_name(key)) if _keys else None
    return found is None or not found.is_only_let_through(op)


def registrations(key_name: str) -> list[str]:
    """Return the ops that have a kernel at an Autocast key."""
    names = dispatch_get_registrations_for_dispatch_key(key_name)
    found = _keys.get(key_name)
    return names if found is None else [name for name in names if not found.is_only_let_through(name)]
