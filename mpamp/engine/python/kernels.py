"""Which ops need a kernel of ours at a device's Autocast key, and putting it there or taking it away.

Where a table's row is what torch's own C++ kernel does, and no cast has to be kept, torch's kernel runs and
ours is not installed; nor is it over a kernel of somebody else's, unless a rule asks. ``building`` makes the others.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ...devices.fallthroughs import has_kernel, let_through, let_through_new, registrations
from ...devices.listeners import LISTENERS
from ...devices.registry import DeviceState, devices_in_use
from ...locks import LOCK, burst
from ...oplists import load_table, table_names
from ...rules.eligibility import find_overload, overload_name
from ...rules.optable import OpTable, Row
from ...rules.policy import RAISING, CastPolicy
from ...torch_internals import OpOverload, get_kernel
from .. import BEFORE_FIRST_INSTALL, compiled
from ..casts.writes import watch_writes
from ..marks import marks_in_use
from ..observing import OBSERVERS
from ..scope import Scope
from . import transforms
from .building import Kernel, Nowhere, build, run_below, write_anew
from .caster import returns_new
from .extensions import cover, overriding, put_on_top, surviving, watch
from .unlisted import unlisted

__all__ = ["install", "installed", "mark_tag_stale", "tag_compiler_caches", "tidy", "withdraw"]

_CACHELESS = {
    "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::linalg_vecdot",
}
"""Ops whose arguments are activations: torch's own kernel serves them as well as ours would."""
_LEFT_TO_TORCH = {*RAISING, CastPolicy.LOWER_PRECISION_FP, CastPolicy.PROMOTE}
"""Policies that our kernel may leave to torch's, call by call; its ban is of float32 arguments too."""

_installed: dict[str, dict[str, Any]] = {}
_overridden: dict[str, set[str]] = {}
"""Of those, the overloads that have a kernel of torch's, or of somebody else's, under ours."""
_planned: dict[str, WeakKeyDictionary[OpTable, dict[torch.dtype, bool]]] = {}
"""By device type, the tables in use whose kernels are in place for a region dtype, and whether all their ops exist."""


# -- Which ops need a kernel of ours -----------------------------------------------------------------


def native_ops(device: DeviceState) -> set[str]:
    """Return the overloads that have a kernel at the device's Autocast key that isn't ours."""
    found = {n for n in registrations(device.key_name) if find_overload(n) is not None}
    return (found - _installed.get(device.type, {}).keys()) | _overridden.get(device.type, set())


def is_native(device: DeviceState, op: str) -> bool:
    """Tell whether an overload has a kernel at the device's Autocast key that isn't ours."""
    if op in _installed.get(device.type, {}):
        return op in _overridden[device.type]
    return has_kernel(op, device.key)


@functools.cache
def _native_policies(device_type: str) -> Mapping[str, Row]:
    return load_table("native", device_type) if "native" in table_names(device_type) else {}


def needs_kernel(device: DeviceState, table: OpTable, dtype: torch.dtype) -> list[str]:
    """Return the overloads that the kernels there don't serve as the table says in regions of ``dtype``."""
    native, policies = native_ops(device), _native_policies(device.type)
    unlisted = {op for op in native if op in policies and op not in table}
    found = []
    for op, row in table.items():
        policy = row.at(dtype)
        if policy is None or (op in native and _is_torchs(op, policy, policies.get(op))):
            continue
        if find_overload(op) is not None:
            found.append(op)
    return sorted(unlisted.union(found))


def _is_torchs(op: str, policy: CastPolicy, native: Row | None) -> bool:
    if native is None or policy is not native.policy:
        return False
    return policy in RAISING or op in _CACHELESS


# -- Installing and withdrawing ----------------------------------------------------------------------


def install(device: DeviceState, table: OpTable, dtype: torch.dtype) -> bool:
    """Install what ``table`` needs in regions of ``dtype`` at the device's Autocast key; what is there stays.

    Where a module that registers Autocast kernels of its own has been imported since, ours go on top again.
    Returns whether every op of the table exists; a library that is imported later may bring the others.
    """
    device.prepare()
    with burst(), LOCK, overriding():
        _prepare_once()
        if device.type in _installed and device.see_modules():
            _reinstall(device)
        if device.type not in _installed:
            _installed[device.type], _overridden[device.type] = {}, set()
            let_through(device.key)
        planned = _planned.setdefault(device.type, WeakKeyDictionary()).setdefault(table, {})
        if not planned.get(dtype, False):
            for op in needs_kernel(device, table, dtype):
                if op not in _installed[device.type]:
                    _install_one(device, op)
            _let_observe(device, table)
            listed = [op for op, row in table.items() if row.at(dtype) is not None]
            transforms.install(device, [*listed, *transforms.UNLISTED])
            planned[dtype] = all(find_overload(op) is not None for op in table)
            mark_tag_stale()
        if not _tag.is_fresh:
            tag_compiler_caches()
            _tag.is_fresh = True
        return planned[dtype]


@functools.cache
def _prepare_once() -> None:
    watch_writes()
    for prepare in BEFORE_FIRST_INSTALL:
        prepare()
    watch(_make_anew, _stay_on_top)


def _make_anew(op: str) -> None:
    """Make our kernel of an op anew, for its schema may be another one; it may be a new op, too."""
    let_through_new(op)
    with LOCK, overriding():
        for device in _devices_with(op):
            _installed[device.type].pop(op)._destroy()
            _install_one(device, op)
        transforms.make_anew(op)


def _stay_on_top(key_name: str, op: str) -> None:
    """Put our kernel back over one that has just been registered: the table decides in regions, that outside."""
    with LOCK, overriding():
        for device in _devices_with(op):
            if device.key_name == key_name:
                _installed[device.type].pop(op)._destroy()
                _install_one(device, op, is_torchs=False)


def _devices_with(op: str) -> list[DeviceState]:
    return [device for device in devices_in_use() if op in _installed.get(device.type, {})]


def _reinstall(device: DeviceState) -> None:
    planned = [(table, dtype) for table, dtypes in _planned.get(device.type, {}).items() for dtype in dtypes]
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
            transforms.withdraw(device)
        _planned.pop(device.type, None)
        device.invalidate()


def tidy(device: DeviceState) -> None:
    """Take out the kernels that only rules of regions past asked for; a region that needs one puts it back.

    Worth it for arithmetic: a kernel of ours there is called for every addition, and functorch can't pass it
    the plain numbers that such calls have.
    """
    dtypes = device.backend.lower_precision_dtypes
    needed = {op for dtype in dtypes for op in needs_kernel(device, device.table, dtype)}
    withdraw(device, set(installed(device.type)) - needed)


# -- For observers ---------------------------------------------------------------------------------------

_for_observers: dict[str, set[str]] = {}
"""By device type, the overloads that have a kernel of ours only while somebody observes."""


def _let_observe(device: DeviceState, table: OpTable) -> None:
    """Install kernels for the ops that are to be observed and need none, if somebody observes."""
    if OBSERVERS.all:
        listed = {op for op, row in table.items() if row.policies() and find_overload(op) is not None}
        ops = sorted((listed | unlisted()) - _installed[device.type].keys())
        for op in ops:
            _install_one(device, op)
        transforms.install(device, ops, apart=True)
        _for_observers.setdefault(device.type, set()).update(ops)


def _observing_changed() -> None:
    """Begin to let observers see, or leave nothing of it."""
    write_anew()
    for device in devices_in_use():
        if device.type not in _installed:
            continue
        planned = [(table, d) for table, dtypes in _planned.get(device.type, {}).items() for d in dtypes]
        with burst(), overriding():
            for table in {table for table, _ in planned}:
                _let_observe(device, table)
        if not OBSERVERS.all:
            own = _for_observers.pop(device.type, set())
            needed = {op for table, dtype in planned for op in needs_kernel(device, table, dtype)}
            for op in (own & _installed[device.type].keys()) - needed:
                _installed[device.type].pop(op)._destroy()
                _overridden[device.type].discard(op)
            listed = {op for table, dtype in planned for op, row in table.items() if row.at(dtype) is not None}
            transforms.withdraw_apart(device, own - listed)
    if not OBSERVERS.all:
        transforms.withdraw_idle()


OBSERVERS.changed.append(_observing_changed)


def installed(device_type: str) -> list[str]:
    """Return the overloads that run a kernel of ours on a device type, in alphabetical order."""
    return sorted(_installed.get(device_type, {}))


def _install_one(device: DeviceState, name: str, *, is_torchs: bool = True) -> None:
    """Install our kernel of one op; ``is_torchs`` is False where the kernel under it is known to be another's."""
    found = has_kernel(name, device.key)
    (_overridden[device.type].add if found else _overridden[device.type].discard)(name)
    namespace, _, rest = name.partition("::")
    kernel, op = _kernel(device, name, is_torchs=is_torchs), find_overload(name)
    assert op is not None
    row = _native_policies(device.type).get(name) if found and is_torchs and not device.has_vendor_kernels else None
    library = compiled.install(device, op, kernel, torchs=None if row is None else row.policy, keeps=returns_new(op))
    if library is None:
        library = torch.library.Library(namespace, "IMPL")
        put_on_top(library, rest, device.key_name, kernel)
    _installed[device.type][name] = library


def _kernel(device: DeviceState, name: str, *, is_torchs: bool) -> Kernel:
    op, row = find_overload(name), _native_policies(device.type).get(name)
    assert op is not None
    is_torchs = is_torchs and row is not None and not device.has_vendor_kernels
    native = _native_kernel(device, op) if name in _overridden[device.type] else None
    below = run_below(device, op)
    outside = below if native is None else native if is_torchs else surviving(native, below)
    # A row of the table that this torch has no kernel for isn't torch's here.
    is_left = native is not None and row is not None and is_torchs and row.policy in _LEFT_TO_TORCH
    torchs = row.policy if is_left and row is not None else None

    def absent(scope: Scope, keys: Any, /, *args: Any, **kwargs: Any) -> Any:
        # A table that doesn't list an op of torch's has taken it out; kernels of others it can't know.
        run = below if row is not None and name not in scope.table else outside
        return run(keys, *args, **kwargs)

    if op.namespace != "aten":
        cover(op, device.key)
    return build(device, op, outside=outside, absent=absent, torchs=torchs)


def _native_kernel(device: DeviceState, op: OpOverload) -> Callable[..., Any]:
    """Return the kernel that ours goes on top of."""
    if get_kernel is not None:
        return get_kernel(op, device.key).call_boxed  # type: ignore[no-any-return]  # not every key goes by name
    # No kernel can be had: follow the policy that torch's has.
    row = _native_policies(device.type).get(overload_name(op), Row(None))
    scope = Scope(OpTable.from_rows({overload_name(op): row}, name="native"), None)
    below = run_below(device, op)
    absent = functools.partial(_ignore_scope, below)
    return build(device, op, outside=below, absent=absent, thread=Nowhere, resolve=lambda _: scope, may_tell=False)


def _ignore_scope(run: Kernel, scope: Scope, /, *args: Any, **kwargs: Any) -> Any:
    return run(*args, **kwargs)


class _Tag:
    is_fresh = False


_tag = _Tag()


def mark_tag_stale() -> None:
    """Have the compiler's caches be tagged anew at the next region: the tables in use have changed."""
    _tag.is_fresh = False


def tag_compiler_caches() -> None:
    """Put the tables in use into the key of the compiler's disk caches, which don't see kernels."""
    parts = [f"{d.type}={d.table.fingerprint}" for d in sorted(devices_in_use(), key=lambda d: d.type)]
    parts += [f"{m.state}:" + ",".join(sorted(f"{d}={t.fingerprint}" for d, t in m.tables)) for m in marks_in_use()]
    import torch.compiler.config as config

    digest = hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]
    kept = str(config.cache_key_tag or "").partition("mpamp-")[0]
    config.cache_key_tag = f"{kept}mpamp-{digest}"


LISTENERS.rules_changed.append(mark_tag_stale)


compiled.core()  # regions made from now on are for it, too
