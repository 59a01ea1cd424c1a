"""A kernel per (op, Autocast key): built from the op's schema, installed when a table needs it, withdrawn on demand.

Where a table's row is what torch's own C++ kernel does, and no cast has to be kept, no kernel of ours is
installed. One of ours does, for every call:

    scope -> policy -> the arguments' dtype -> cast -> the op itself, with the Autocast key off

The op is called from the top with its key off, as torch's own autocast kernels do: most ops of the tables
are composite, and what they are made of must not be cast a second time.
"""

from __future__ import annotations

import hashlib
import keyword
import linecache
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._ops import OpOverload

from . import scope as _scope
from .castcache import is_weight, watch_optimizers
from .eligibility import find_overload, is_in_place
from .oplists import load_table, table_names
from .optable import APPEND_DTYPE, OpTable, Row
from .policy import CASTABLE, CastPolicy, target_dtype
from .registry import DeviceState

__all__ = ["install", "installed", "tag_compiler_caches", "withdraw"]

_CACHELESS = {
    "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::linalg_vecdot",
}
"""Ops whose arguments are activations: torch's own kernel serves them as well as ours would."""
_TORCH_ONLY = {"aten::_cudnn_rnn", "aten::miopen_rnn"}
"""Ops whose kernel in torch does more than cast: it lays the weights out anew."""
_SAME_AS_TORCH = {CastPolicy.FP32, CastPolicy.FP32_SET_OPT_DTYPE, CastPolicy.FP32_APPEND_DTYPE}
_UNSET = object()

_lock = threading.RLock()
_installed: dict[str, dict[str, torch.library.Library]] = {}
_planned: set[tuple[str, OpTable, torch.dtype]] = set()


# -- Which ops need a kernel of ours -----------------------------------------------------------------


def native_ops(device: DeviceState) -> set[str]:
    """Return the overloads that have a kernel at the device's Autocast key that isn't ours."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(device.key_name)
    found = {n for n in names if find_overload(n) is not None}
    return (found - _installed.get(device.type, {}).keys()) | _overridden.get(device.type, set())


_overridden: dict[str, set[str]] = {}


def _native_policy(device: DeviceState) -> dict[str, Row]:
    return dict(load_table("native", device.type)) if "native" in table_names(device.type) else {}


def needs_kernel(device: DeviceState, table: OpTable, dtype: torch.dtype) -> list[str]:
    """Return the overloads that torch's own kernels don't serve as the table says in regions of ``dtype``."""
    native, policies = native_ops(device), _native_policy(device)
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
    return policy in _SAME_AS_TORCH or op in _CACHELESS or op in _TORCH_ONLY


# -- Installing and withdrawing ----------------------------------------------------------------------


def install(device: DeviceState, table: OpTable, dtype: torch.dtype) -> None:
    """Install what ``table`` needs in regions of ``dtype`` at the device's Autocast key; what is there stays.

    Where a module that registers Autocast kernels of its own has been imported since, ours go on top again.
    """
    with _lock:
        if not _installed:
            watch_optimizers()
        if device.type not in _installed:
            device.backend.prepare()
            _installed[device.type], _overridden[device.type] = {}, set()
            _add_fallthrough(device)
        elif device.see_modules():
            _reinstall(device)
        if (device.type, table, dtype) not in _planned:
            for op in needs_kernel(device, table, dtype):
                if op not in _installed[device.type]:
                    _install_one(device, op)
            _planned.add((device.type, table, dtype))
            tag_compiler_caches()


def _reinstall(device: DeviceState) -> None:
    planned = [(t, dtype) for d, t, dtype in _planned if d == device.type]
    withdraw(device)
    for table, dtype in planned:
        install(device, table, dtype)


def withdraw(device: DeviceState, ops: Iterable[str] | None = None) -> None:
    """Take our kernels for a device out of the dispatcher; torch's own run again."""
    with _lock:
        libraries = _installed.get(device.type, {})
        for op in list(libraries) if ops is None else list(ops):
            libraries.pop(op)._destroy()
            _overridden[device.type].discard(op)
        if ops is None:
            _installed.pop(device.type, None)
            _planned.difference_update({p for p in _planned if p[0] == device.type})


def installed(device_type: str) -> list[str]:
    """Return the overloads that run a kernel of ours on a device type, in alphabetical order."""
    return sorted(op for op in _installed.get(device_type, {}) if op != _FALLTHROUGH)


def _install_one(device: DeviceState, name: str) -> None:
    op = find_overload(name)
    assert op is not None
    is_native = torch._C._dispatch_has_kernel_for_dispatch_key(name, device.key)
    kernel = build(device, op, _native_kernel(device, op) if is_native else None)
    if is_native:
        _overridden[device.type].add(name)
    namespace, _, rest = name.partition("::")
    library = torch.library.Library(namespace, "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*[Oo]verriding a previously registered kernel")
        _register(library, rest, kernel, device.key_name)
    _installed[device.type][name] = library


def _register(library: torch.library.Library, name: str, kernel: Callable[..., Any], key: str) -> None:
    try:
        library.impl(name, kernel, key, with_keyset=True, allow_override=True)
    except TypeError:  # torch before 2.8 final
        library.impl(name, kernel, key, with_keyset=True)


_FALLTHROUGH = "_"


def _add_fallthrough(device: DeviceState) -> None:
    # PrivateUse1 and a few others have no fallback at their Autocast key: any op without a kernel would raise.
    if not torch._C._dispatch_has_backend_fallback(device.key):
        library = torch.library.Library("_", "IMPL")
        library.fallback(torch.library.fallthrough_kernel, device.key_name)
        _installed[device.type][_FALLTHROUGH] = library


def tag_compiler_caches() -> None:
    """Put the tables in use into the key of the compiler's disk caches, which don't see kernels."""
    from .registry import devices_in_use

    parts = [f"{d.type}={d.table.fingerprint}" for d in sorted(devices_in_use(), key=lambda d: d.type)]
    parts += [",".join(sorted(f"{d}={t.fingerprint}" for d, t in pairs)) for pairs in _scope.tables_in_use()]
    import torch.compiler.config as config

    digest = hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]
    kept = str(config.cache_key_tag or "").partition("mpamp-")[0]
    config.cache_key_tag = f"{kept}mpamp-{digest}"


# -- Building a kernel -------------------------------------------------------------------------------


def _native_kernel(device: DeviceState, op: OpOverload) -> Callable[..., Any]:
    """Return torch's own kernel for an op that ours goes on top of."""
    name = f"{op._schema.name}.{op._schema.overload_name}".rstrip(".")
    if hasattr(torch.library, "get_kernel"):
        return torch.library.get_kernel(op, device.key_name).call_boxed  # type: ignore[no-any-return]
    row = _native_policy(device).get(name)
    return build(device, op, None, fixed=None if row is None else row.policy)


_FAST = {
    name: function
    for name, function in {
        "aten::linear": torch._C._nn.linear,
        **{f"aten::{n}": getattr(torch, n) for n in "mm bmm addmm baddbmm addbmm matmul mv addmv prelu cat stack".split()},
        **{f"aten::conv{n}d{o}": getattr(torch, f"conv{n}d") for n in (1, 2, 3) for o in ("", ".padding")},
    }.items()
}
"""Bindings that reach the same overload sooner than ``torch.ops`` does."""


def build(
    device: DeviceState,
    op: OpOverload,
    native: Callable[..., Any] | None,
    *,
    fixed: CastPolicy | None | object = _UNSET,
) -> Callable[..., Any]:
    """Return the kernel of one op at a device's Autocast key.

    Args:
        device: The device whose key it will be installed at.
        op: The overload.
        native: The kernel that it goes on top of, called outside of regions; None where there is none.
        fixed: A policy to follow whatever the scope, in place of ``native``.
    """
    schema = op._schema
    name = f"{schema.name}.{schema.overload_name}".rstrip(".")
    after = torch._C._dispatch_keyset_full_after(device.key)

    def unlisted(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return op.redispatch(keys & after, *args, **kwargs)

    def torchs(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return native(keys, *args, **kwargs)  # type: ignore[misc]

    outside = unlisted if native is None else native
    may_alias = any(r.alias_info is not None for r in schema.returns)
    append = find_overload(APPEND_DTYPE[name]) if name in APPEND_DTYPE else None
    fixed_scope = None if fixed is _UNSET else _scope.Scope(OpTable.from_rows({name: Row(fixed)}, name="torch"), None)  # type: ignore[arg-type]
    resolve = _scope.resolve if fixed is _UNSET else lambda _: fixed_scope
    cast = _caster(device, keep=not may_alias)
    environment = {
        "OP": name,
        "TYPE": device.type,
        "KEY": device.key,
        "LOWER": CastPolicy.LOWER_PRECISION_FP,
        "PROMOTE": CastPolicy.PROMOTE,
        "SET_OPT": CastPolicy.FP32_SET_OPT_DTYPE,
        "APPEND": CastPolicy.FP32_APPEND_DTYPE,
        "FLOAT32": torch.float32,
        "FLOAT64": torch.float64,
        "CASTABLE": CASTABLE,
        "device": device,
        "INDEX": device.index,
        "thread": _scope.THREAD if fixed is _UNSET else _NOWHERE,
        "graph_task": _scope.graph_task,
        "mode_depth": _scope.mode_depth,
        "resolve": resolve,
        "outside": outside,
        "absent": _absent(name, native, torchs, unlisted),
        "unlisted": unlisted,
        "get_dtype": torch.get_autocast_dtype,
        "target_of": _target_of(device, name),
        "cast": cast,
        "cast_all": lambda tensors, target, scope: [t if t is None else cast(t, target, scope) for t in tensors],
        "set_excluded": torch._C._dispatch_tls_set_dispatch_key_excluded,
        "call": _FAST.get(name, op._op),
        "call_append": None if append is None else append._op,
        **{f"D{i}": a.default_value for i, a in enumerate(schema.arguments) if a.has_default_value()},
    }
    source = kernel_source(op)
    file = f"<mpamp kernel {device.type} {name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    exec(compile(source, file, "exec"), environment)
    return environment["kernel"]  # type: ignore[no-any-return]


class _Nowhere:
    """A thread without regions, for kernels that follow one fixed policy."""

    state = _scope.ThreadState()


_NOWHERE = _Nowhere()


def _absent(
    name: str, native: Callable[..., Any] | None, torchs: Callable[..., Any], unlisted: Callable[..., Any]
) -> Callable[..., Any]:
    """Return what runs in a scope whose table gives the op no policy."""
    if native is None:
        return lambda scope, *args, **kwargs: unlisted(*args, **kwargs)
    return lambda scope, *args, **kwargs: (torchs if name in scope.table else unlisted)(*args, **kwargs)


def _target_of(device: DeviceState, name: str) -> Callable[..., torch.dtype | None]:
    on_device = device.backend.tensor_check()

    def target_of(policy: CastPolicy | None, lower: torch.dtype, tensors: Iterable[Any]) -> torch.dtype | None:
        flat = [t for item in tensors for t in (item if isinstance(item, list | tuple) else (item,)) if t is not None]
        if any(t.dtype is torch.float64 for t in flat):
            return None
        dtypes = [t.dtype for t in flat if t.dtype in CASTABLE and on_device(t)]
        return target_dtype(policy, name, lower, dtypes)

    return target_of


def _caster(device: DeviceState, *, keep: bool) -> Callable[..., Any]:
    """Return the function that casts one argument, from the cache where it is a weight."""
    on_device, capturing = device.backend.tensor_check(), device.backend.capture_check()
    is_tracing = torch._C._is_tracing
    functorch = torch._C._functorch.peek_interpreter_stack

    def cast(tensor: torch.Tensor, target: torch.dtype, scope: _scope.Scope) -> torch.Tensor:
        cache = scope.cache
        if keep and cache is not None and not is_tracing() and functorch() is None:
            if capturing is None or not capturing():
                kept = cache.find(tensor, target)
                if kept is not None:
                    return kept
                if is_weight(tensor) and on_device(tensor):
                    return cache.add(tensor, target)
        if tensor.dtype is target or tensor.dtype not in CASTABLE or not on_device(tensor):
            return tensor
        return tensor.to(target)

    return cast


def kernel_source(op: OpOverload) -> str:
    """Return the Python source of an op's kernel, specialised on its schema.

    Example:
        >>> print(kernel_source(torch.ops.aten.mm.default).splitlines()[0])
        def kernel(_keys, a0, a1):
    """
    arguments = list(op._schema.arguments)
    names = [a.name if a.kwarg_only and not keyword.iskeyword(a.name) else f"a{i}" for i, a in enumerate(arguments)]
    default = {i: f"=D{i}" if a.has_default_value() else "" for i, a in enumerate(arguments)}
    positional = [i for i, a in enumerate(arguments) if not a.kwarg_only]
    keywords = [i for i, a in enumerate(arguments) if a.kwarg_only]
    head = ["_keys", *(names[i] + default[i] for i in positional)]
    head += ["*", *(names[i] + default[i] for i in keywords)] if keywords else []
    passed = ", ".join([*(names[i] for i in positional), *(f"{arguments[i].name}={names[i]}" for i in keywords)])
    tensors = [(names[i], str(a.type)) for i, a in enumerate(arguments) if "Tensor" in str(a.type)]
    body = _in_place_body(tensors) if is_in_place(op) else _body(op, names, tensors, passed)
    return f"""\
def kernel({", ".join(head)}):
    _scope = thread.state.scopes[INDEX]
    if _scope is None or graph_task() != _scope.task or mode_depth():
        _scope = resolve(device)
        if _scope is None:
            return outside(_keys, {passed})
    _lower = get_dtype(TYPE)
    _policy = _scope.rules[_lower].get(OP)
    if _policy is None:
        return absent(_scope, _keys, {passed})
{body}
    set_excluded(KEY, True)
    try:
        return call({passed})
    finally:
        set_excluded(KEY, False)
"""


def _body(op: OpOverload, names: list[str], tensors: list[tuple[str, str]], passed: str) -> str:
    lines = []
    single = [n for n, kind in tensors if "List" not in kind and "[]" not in kind]
    may_be_none = {n for n, kind in tensors if kind.startswith("Optional")}
    dtypes = [f"{n}.dtype" if n not in may_be_none else f"({n} is not None and {n}.dtype)" for n in single]
    everything = ", ".join(n for n, _ in tensors) + ","
    if len(single) == len(tensors):
        has_double = " or ".join(f"{d} is FLOAT64" for d in dtypes)
        lines += ["if _policy is LOWER:", f"    _target = None if {has_double} else _lower"]
        lines += ["else:", f"    _target = target_of(_policy, _lower, ({everything}))"]
    else:
        lines += [f"_target = target_of(_policy, _lower, ({everything}))"]
    lines += ["if _target is not None:"]
    for name, kind in tensors:
        is_list = name not in single
        guard = f"{name} is not None" if name in may_be_none else "True"
        test = guard if is_list else f"{name}.dtype is not _target"
        test = test if guard == "True" or is_list else f"{guard} and {test}"
        lines += [f"    if {test}:", f"        {name} = {'cast_all' if is_list else 'cast'}({name}, _target, _scope)"]
    lines += _dtype_lines(op, names, tensors[0][0], passed)
    return "\n".join("    " + line for line in lines)


def _dtype_lines(op: OpOverload, names: list[str], first: str, passed: str) -> list[str]:
    name = f"{op._schema.name}.{op._schema.overload_name}"
    is_castable = f"{first}.dtype in CASTABLE"
    if name in APPEND_DTYPE:
        return [
            f"if _policy is APPEND and {is_castable}:",
            "    set_excluded(KEY, True)",
            "    try:",
            f"        return call_append({passed}, dtype=FLOAT32)",
            "    finally:",
            "        set_excluded(KEY, False)",
        ]
    own = next((n for n, a in zip(names, op._schema.arguments, strict=True) if a.name == "dtype"), None)
    if own is None:
        return []
    return [f"if _policy is SET_OPT and {own} is None and {is_castable}:", f"    {own} = FLOAT32"]


def _in_place_body(tensors: list[tuple[str, str]]) -> str:
    (written, _), *others = tensors
    lines = [f"_target = {written}.dtype", "if _policy is PROMOTE and _target in CASTABLE:"]
    for name, kind in others:
        is_list = "List" in kind or "[]" in kind
        lines += [f"    if {name} is not None:", f"        {name} = {'cast_all' if is_list else 'cast'}({name}, _target, _scope)"]
    return "\n".join("    " + line for line in [*lines, "    pass"])
