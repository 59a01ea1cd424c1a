"""Which ops need a kernel of ours at a device's Autocast key, and putting it there or taking it away.

Where a table's row is what torch's own C++ kernel does, and no cast has to be kept, torch's kernel runs and
ours is not installed. ``codegen`` builds the others.
"""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from . import scope as _scope
from .carrying import serve_autograd
from .codegen import Nowhere, build
from .eligibility import find_overload, overload_name
from .locks import LOCK
from .marks import marks_in_use
from .oplists import load_table, table_names
from .optable import OpTable, Row
from .policy import CastPolicy
from .registry import DeviceState
from .threads import serve_data_parallel
from .writes import watch_writes

__all__ = ["install", "installed", "mark_tag_stale", "tag_compiler_caches", "tidy", "withdraw"]

_CACHELESS = {
    "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::linalg_vecdot",
}
"""Ops whose arguments are activations: torch's own kernel serves them as well as ours would."""
_SAME_AS_TORCH = {CastPolicy.FP32, CastPolicy.FP32_SET_OPT_DTYPE, CastPolicy.FP32_APPEND_DTYPE}

_LEFT_TO_TORCH = {*_SAME_AS_TORCH, CastPolicy.LOWER_PRECISION_FP, CastPolicy.PROMOTE}
"""Policies that our kernel may leave to torch's, call by call; its ban is of float32 arguments too."""

_installed: dict[str, dict[str, torch.library.Library]] = {}
_overridden: dict[str, set[str]] = {}
"""Of those, the overloads that have a kernel of torch's, or a vendor's, under ours."""
_planned: set[tuple[str, OpTable, torch.dtype]] = set()


# -- Which ops need a kernel of ours -----------------------------------------------------------------


def native_ops(device: DeviceState) -> set[str]:
    """Return the overloads that have a kernel at the device's Autocast key that isn't ours."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(device.key_name)
    found = {n for n in names if find_overload(n) is not None}
    return (found - _installed.get(device.type, {}).keys()) | _overridden.get(device.type, set())


def is_native(device: DeviceState, op: str) -> bool:
    """Tell whether an overload has a kernel at the device's Autocast key that isn't ours."""
    if op in _installed.get(device.type, {}):
        return op in _overridden[device.type]
    return torch._C._dispatch_has_kernel_for_dispatch_key(op, device.key)


@functools.cache
def _native_policies(device_type: str) -> Mapping[str, Row]:
    return load_table("native", device_type) if "native" in table_names(device_type) else {}


def needs_kernel(device: DeviceState, table: OpTable, dtype: torch.dtype) -> list[str]:
    """Return the overloads that torch's own kernels don't serve as the table says in regions of ``dtype``."""
    native, policies = native_ops(device), _native_policies(device.type)
    found = []
    for op in sorted(native | set(table)):
        row = table.get(op)
        if op in native:
            if row is None or not _is_torchs(op, row.at(dtype), policies.get(op)):
                found.append(op)
        elif row is not None and row.at(dtype) is not None and find_overload(op) is not None:
            found.append(op)
    return found


def _is_torchs(op: str, policy: CastPolicy | None, native: Row | None) -> bool:
    if policy is None:
        return True
    if native is None or policy is not native.policy:
        return False
    return policy in _SAME_AS_TORCH or op in _CACHELESS


# -- Installing and withdrawing ----------------------------------------------------------------------


def install(device: DeviceState, table: OpTable, dtype: torch.dtype) -> None:
    """Install what ``table`` needs in regions of ``dtype`` at the device's Autocast key; what is there stays.

    Where a module that registers Autocast kernels of its own has been imported since, ours go on top again.
    """
    device.prepare()
    with LOCK:
        _prepare_once()
        if device.type in _installed and device.see_modules():
            _reinstall(device)
        if device.type not in _installed:
            _installed[device.type], _overridden[device.type] = {}, set()
            _add_fallthrough(device)
        if (device.type, table, dtype) not in _planned:
            for op in needs_kernel(device, table, dtype):
                if op not in _installed[device.type]:
                    _install_one(device, op)
            _planned.add((device.type, table, dtype))
            mark_tag_stale()
        if not _tag.is_fresh:
            tag_compiler_caches()
            _tag.is_fresh = True


@functools.cache
def _prepare_once() -> None:
    from .exporting import serve_export  # not before: it imports torch's tracers

    watch_writes()
    serve_data_parallel()
    serve_autograd()
    serve_export()


def _reinstall(device: DeviceState) -> None:
    planned = [(t, dtype) for d, t, dtype in _planned if d == device.type]
    withdraw(device)
    for table, dtype in planned:
        install(device, table, dtype)


def withdraw(device: DeviceState, ops: Iterable[str] | None = None) -> None:
    """Take our kernels for a device out of the dispatcher; torch's own run again."""
    with LOCK:
        libraries = _installed.get(device.type, {})
        for op in list(libraries) if ops is None else list(ops):
            libraries.pop(op)._destroy()
            _overridden[device.type].discard(op)
        if ops is None:
            _installed.pop(device.type, None)
        _planned.difference_update({p for p in _planned if p[0] == device.type})
        device.invalidate()


def tidy(device: DeviceState) -> None:
    """Take out the kernels that only rules of regions past asked for; a region that needs one puts it back.

    Worth it for arithmetic: a kernel of ours there is called for every addition, and functorch can't pass it
    the plain numbers that such calls have.
    """
    dtypes = device.backend.lower_precision_dtypes
    needed = {op for dtype in dtypes for op in needs_kernel(device, device.table, dtype)}
    withdraw(device, set(installed(device.type)) - needed)


def installed(device_type: str) -> list[str]:
    """Return the overloads that run a kernel of ours on a device type, in alphabetical order."""
    return sorted(op for op in _installed.get(device_type, {}) if op != _FALLTHROUGH)


def _install_one(device: DeviceState, name: str) -> None:
    op = find_overload(name)
    assert op is not None
    is_native = torch._C._dispatch_has_kernel_for_dispatch_key(name, device.key)
    row = _native_policies(device.type).get(name) if is_native else None
    is_left = row is not None and row.policy in _LEFT_TO_TORCH and not device.has_vendor_kernels
    torchs = row.policy if row is not None and is_left else None
    kernel = build(device, op, _native_kernel(device, op) if is_native else None, torchs=torchs)
    if is_native:
        _overridden[device.type].add(name)
    namespace, _, rest = name.partition("::")
    library = torch.library.Library(namespace, "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*[Oo]verriding a previously registered kernel")
        library.impl(rest, kernel, device.key_name, with_keyset=True, allow_override=True)
    _installed[device.type][name] = library


def _native_kernel(device: DeviceState, op: OpOverload) -> Callable[..., Any]:
    """Return torch's own kernel for an op that ours goes on top of."""
    if hasattr(torch.library, "get_kernel"):
        return torch.library.get_kernel(op, device.key).call_boxed  # not every key goes by name
    # Before torch 2.9 a kernel can't be had: follow the policy that torch's has.
    row = _native_policies(device.type).get(overload_name(op), Row(None))
    scope = _scope.Scope(OpTable.from_rows({overload_name(op): row}, name="native"), None)
    return build(device, op, None, thread=Nowhere, resolve=lambda _: scope)


_FALLTHROUGH = "_"


def _add_fallthrough(device: DeviceState) -> None:
    # PrivateUse1 and a few others have no fallback at their Autocast key: any op without a kernel would raise.
    if not torch._C._dispatch_has_backend_fallback(device.key):
        library = torch.library.Library("_", "IMPL")
        library.fallback(torch.library.fallthrough_kernel, device.key_name)
        _installed[device.type][_FALLTHROUGH] = library


class _Tag:
    is_fresh = False


_tag = _Tag()


def mark_tag_stale() -> None:
    """Have the compiler's caches be tagged anew at the next region: the tables in use have changed."""
    _tag.is_fresh = False


def tag_compiler_caches() -> None:
    """Put the tables in use into the key of the compiler's disk caches, which don't see kernels."""
    from .registry import devices_in_use

    parts = [f"{d.type}={d.table.fingerprint}" for d in sorted(devices_in_use(), key=lambda d: d.type)]
    parts += [f"{m.state}:" + ",".join(sorted(f"{d}={t.fingerprint}" for d, t in m.tables)) for m in marks_in_use()]
    import torch.compiler.config as config

    digest = hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]
    kept = str(config.cache_key_tag or "").partition("mpamp-")[0]
    config.cache_key_tag = f"{kept}mpamp-{digest}"
