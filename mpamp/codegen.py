"""Builds a kernel from an op's schema: no generic loop over arguments, one straight path a call.

    scope -> policy -> the arguments' dtype -> cast -> the op itself, with the Autocast key off

The op is called from the top with its key off, as torch's own autocast kernels do: most ops of the tables
are composite, and what they are made of must not be cast a second time.
"""

from __future__ import annotations

import functools
import keyword
import linecache
import math
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from . import scope as _scope
from .caster import caster, keeper, returns_new
from .compiling import left_out_by_itself
from .eligibility import OBSERVERS, find_overload, is_in_place, overload_name
from .oplists import families
from .policy import CASTABLE, CastPolicy, target_dtype
from .rows import APPEND_DTYPE

if TYPE_CHECKING:
    from .registry import DeviceState

__all__ = ["build", "kernel_source"]

_TORCH = "mm bmm addmm baddbmm addbmm matmul mv addmv prelu cat stack"
_FAST: dict[str, Callable[..., Any]] = {
    "aten::linear": torch._C._nn.linear,
    **{f"aten::{name}": getattr(torch, name) for name in _TORCH.split(" ")},
    **{f"aten::conv{n}d{overload}": getattr(torch, f"conv{n}d") for n in (1, 2, 3) for overload in ("", ".padding")},
}
"""Bindings that reach the same overload sooner than ``torch.ops`` does."""

_ARITHMETIC = "add sub mul div multiply divide subtract true_divide floor_divide rsub remainder"
TAKE_NUMBERS = {f"aten::{name}{suffix}" for name in _ARITHMETIC.split(" ") for suffix in ("", "_")}
"""Ops whose kernel is given a number where the call had one in a tensor's place."""

_PRODUCTS = {f"aten::{name}" for family in ("matmul", "matvec") for name in families()[family]}
"""Ops that take sparse tensors."""

Resolve = Callable[["DeviceState"], "_scope.Scope | None"]


class Nowhere:
    """Stands for a thread without open regions, so that ``resolve`` alone gives a kernel its scope."""

    state = _scope.ThreadState()


def build(
    device: DeviceState,
    op: OpOverload,
    native: Callable[..., Any] | None,
    *,
    torchs: CastPolicy | None = None,
    thread: Any = _scope.THREAD,
    resolve: Resolve = _scope.resolve,
) -> Callable[..., Any]:
    """Return the kernel of one op at a device's Autocast key.

    Args:
        device: The device whose key it will be installed at.
        op: The overload.
        native: The kernel that it goes on top of, called outside of regions; None where there is none.
        torchs: The policy that ``native`` follows, where it is one that it may be left to.
        thread: Where the kernel looks for the scope first.
        resolve: What it asks where that doesn't settle it.
    """
    arguments, name = op._schema.arguments, overload_name(op)
    unlisted = _unlisted(device, op)
    cast, cast_apart = caster(device.backend, keep=returns_new(op)), caster(device.backend, keep=False)
    may_keep, kept = keeper(device.backend)
    append = find_overload(APPEND_DTYPE[name]) if name in APPEND_DTYPE else None
    environment: dict[str, Any] = {
        "OP": name,
        "TYPE": device.type,
        "KEY": device.key,
        "INDEX": device.index,
        "device": device,
        "LOWER": CastPolicy.LOWER_PRECISION_FP,
        "TORCHS": torchs,
        "PROMOTE": CastPolicy.PROMOTE,
        "BANNED": CastPolicy.BANNED,
        "SET_OPT": CastPolicy.FP32_SET_OPT_DTYPE,
        "APPEND": CastPolicy.FP32_APPEND_DTYPE,
        "TENSOR": torch.Tensor,
        "FLOAT32": torch.float32,
        "FLOAT64": torch.float64,
        "CASTABLE": CASTABLE,
        **{f"D{i}": a.default_value for i, a in enumerate(arguments) if a.has_default_value()},
        "thread": thread,
        "resolve": resolve,
        "graph_task": _scope.graph_task,
        "mode_depth": _scope.mode_depth,
        "is_overlaid": torch.is_autocast_cache_enabled,  # a region turns it off; a compiled program's regions, on
        "get_dtype": torch.get_autocast_dtype,
        "set_excluded": torch._C._dispatch_tls_set_dispatch_key_excluded,
        "target_of": _target_of(device, name),
        "may_keep": may_keep,
        "kept": kept,
        "knows": _knows,
        "policy_of_sparse": _policy_of_sparse,
        "cast": cast,
        "cast_all": lambda tensors, target, scope: [
            # A product of one tensor may be a view of it.
            t if t is None else (cast if len(tensors) > 1 else cast_apart)(t, target, scope)
            for t in tensors
        ],
        "outside": unlisted if native is None else native,
        "absent": _absent(name, native, unlisted),
        "call": _FAST.get(name, op._op),
        "call_append": None if append is None else append._op,
    }
    minds_sparse = name in _PRODUCTS and not device.backend.has_sparse_lower_precision
    source, file = kernel_source(op, torchs, minds_sparse=minds_sparse), f"<mpamp kernel {device.type} {name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    exec(_compiled(source), environment)
    kernel: FunctionType = environment["kernel"]
    kernel.__code__ = kernel.__code__.replace(co_filename=file, co_name=name)  # for profilers and tracebacks
    return left_out_by_itself(kernel)


@functools.cache
def _compiled(source: str) -> CodeType:
    return compile(source, "<mpamp kernel>", "exec")


def _unlisted(device: DeviceState, op: OpOverload) -> Callable[..., Any]:
    """Return what runs an op as if its Autocast key had no kernel: what it is made of is autocast."""
    if op._schema.name in TAKE_NUMBERS:  # redispatch takes no numbers; these ops are made of nothing
        set_excluded, key = torch._C._dispatch_tls_set_dispatch_key_excluded, device.key

        def below(keys: Any, *args: Any, **kwargs: Any) -> Any:
            set_excluded(key, True)
            try:
                return op._op(*args, **kwargs)
            finally:
                set_excluded(key, False)

        return below
    after = torch._C._dispatch_keyset_full_after(device.key)
    return lambda keys, *args, **kwargs: op.redispatch(keys & after, *args, **kwargs)


def _absent(name: str, native: Callable[..., Any] | None, unlisted: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs in a scope whose table gives the op no policy: torch's kernel if it lists the op."""
    if native is None:
        return lambda scope, *args, **kwargs: unlisted(*args, **kwargs)
    return lambda scope, *args, **kwargs: (native if name in scope.table else unlisted)(*args, **kwargs)


def _target_of(device: DeviceState, name: str) -> Callable[..., torch.dtype | None]:
    on_device = device.backend.tensor_check()

    def target_of(policy: CastPolicy | None, lower: torch.dtype, tensors: Iterable[Any]) -> torch.dtype | None:
        flat = [t for item in tensors for t in (item if isinstance(item, list | tuple) else (item,))]
        numbers = [n for n in flat if isinstance(n, int | float)]
        flat = [t for t in flat if isinstance(t, torch.Tensor)]
        if any(t.dtype is torch.float64 for t in flat):
            return None
        dtypes = [t.dtype for t in flat if t.dtype in CASTABLE and on_device(t)]
        if numbers and not all(_holds(dtype, number) for dtype in dtypes for number in numbers):
            dtypes.append(torch.float32)
        return target_dtype(policy, name, lower, dtypes)

    return target_of


def _holds(dtype: torch.dtype, number: float) -> bool:
    return abs(number) <= _MAX[dtype] or not math.isfinite(number)


def _policy_of_sparse(policy: CastPolicy, tensors: Iterable[Any]) -> CastPolicy:
    """Return the policy of a product on a device without 16-bit kernels for two sparse tensors or a compressed one."""
    layouts = [t.layout for t in tensors if isinstance(t, torch.Tensor) and t.layout in _SPARSE]
    is_missing = len(layouts) > 1 or (layouts and layouts[0] is not torch.sparse_coo)
    return CastPolicy.FP32 if is_missing and policy is CastPolicy.LOWER_PRECISION_FP else policy


WRITTEN = {"running_mean", "running_var"}
"""Arguments that normalization layers write into, though their schemas don't say so: a cast would lose the update."""
_HELD = {"max", "max_val", "min", "min_val", "threshold", "value"}
"""Numbers that a result may hold, by their argument's name: ``promote`` takes one that 16 bits can't for float32's."""
_MAX = {dtype: torch.finfo(dtype).max for dtype in CASTABLE}
_SPARSE = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


def kernel_source(op: OpOverload, torchs: CastPolicy | None = None, *, minds_sparse: bool = False) -> str:
    """Return the Python source of an op's kernel, specialised on its schema and on the policy of torch's own kernel.

    Names of its own start with an underscore, for keyword arguments keep theirs.

    Example:
        >>> print(kernel_source(torch.ops.aten.mm.default).splitlines()[0])
        def kernel(_keys, a0, a1):
    """
    arguments = list(enumerate(op._schema.arguments))
    names = [a.name if a.kwarg_only and not keyword.iskeyword(a.name) else f"a{i}" for i, a in arguments]
    signed = [names[i] + (f"=D{i}" if a.has_default_value() else "") for i, a in arguments]
    positional, keywords = [i for i, a in arguments if not a.kwarg_only], [i for i, a in arguments if a.kwarg_only]
    head = ["_keys", *(signed[i] for i in positional), *(["*"] if keywords else []), *(signed[i] for i in keywords)]
    passed = ", ".join([*(names[i] for i in positional), *(f"{arguments[i][1].name}={names[i]}" for i in keywords)])
    is_state = {i for i, a in arguments if a.name in WRITTEN or (op._schema.name in OBSERVERS and a.alias_info)}
    tensors = [(names[i], str(a.type)) for i, a in arguments if "Tensor" in str(a.type) and i not in is_state]
    held = [names[i] for i, a in arguments if a.name in _HELD and "number" in str(a.type)]
    if op._schema.name in TAKE_NUMBERS:
        tensors = [(name, "Number") for name, _ in tensors]
    left = [] if torchs is None or is_in_place(op) else _short_body(torchs, tensors, passed)
    short = ["if _policy is TORCHS:", *("    " + line for line in left)] if left else []
    body = (
        _in_place_body(tensors)
        if is_in_place(op)
        else [*_body(tensors, held), *_dtype_lines(op, names, tensors, passed)]
    )
    sparse = [f"_policy = policy_of_sparse(_policy, ({', '.join(n for n, _ in tensors)},))"] if minds_sparse else []
    lines = "\n".join("    " + line for line in [*sparse, *short, *body])
    return f"""\
def kernel({", ".join(head)}):
    _scope = thread.state.scopes[INDEX]
    if _scope is None or graph_task() != _scope.task or mode_depth() or is_overlaid():
        _scope = resolve(device)
        if _scope is None:
            return outside(_keys, {passed})
    _lower = get_dtype(TYPE)
    _policy = _scope.rules[_lower].get(OP)
    if _policy is None:
        return absent(_scope, _keys, {passed})
{lines}
    set_excluded(KEY, True)
    try:
        return call({passed})
    finally:
        set_excluded(KEY, False)
"""


def _short_body(torchs: CastPolicy, tensors: list[tuple[str, str]], passed: str) -> list[str]:
    """Return the lines for a call whose policy torch's own kernel follows as well.

    But for some cases: torch keeps no cast of a frozen weight and may keep a stale one, its promote knows
    two dtypes only, and it casts beside a float64 argument.
    """
    run = f"return outside(_keys, {passed})"
    if torchs is CastPolicy.PROMOTE:
        return [f"if knows(_lower, ({', '.join(name for name, _ in tensors)},)):", f"    {run}"]
    if torchs is not CastPolicy.LOWER_PRECISION_FP:
        return [run]
    if any(_is_list(kind) or kind == "Number" for _, kind in tensors):
        return []
    is_double, is_single = (
        " or ".join(f"({_guard(name, kind)}{name}.dtype is {dtype})" for name, kind in tensors)
        for dtype in ("FLOAT64", "FLOAT32")
    )
    lines = [f"if not ({is_double}):"]
    lines += [f"    if ({is_single}) and _lower is not FLOAT32 and may_keep(_scope):", "        _cache = _scope.cache"]
    for name, kind in tensors:
        lines += [f"        if {_guard(name, kind)}{name}.dtype is FLOAT32:"]
        lines += [f"            {name} = kept({name}, _lower, _cache)"]
    return [*lines, f"    {run}"]


def _knows(lower: torch.dtype, tensors: Iterable[Any]) -> bool:
    """Tell whether torch's promote takes a call: it raises on a dtype that is neither float32 nor the region's."""
    for item in tensors:
        for tensor in item if isinstance(item, list | tuple) else (item,):
            if tensor is not None and tensor.dtype is not lower and tensor.dtype is not torch.float32:
                return False
    return True


def _body(tensors: list[tuple[str, str]], held: list[str]) -> list[str]:
    """Return the lines that find the arguments' dtype and cast them to it."""
    everything = ", ".join([*(name for name, _ in tensors), *held]) + ","
    lines = [f"_target = target_of(_policy, _lower, ({everything}))"]
    if not any(_is_list(kind) for _, kind in tensors):
        doubles = [f"{_guard(name, kind)}{name}.dtype is FLOAT64" for name, kind in tensors]
        lines = ["if _policy is LOWER:", f"    _target = None if {' or '.join(doubles)} else _lower"]
        lines += ["else:", f"    _target = target_of(_policy, _lower, ({everything}))"]
    lines += ["if _target is not None:"]
    return [*lines, *(line for name, kind in tensors for line in _cast_lines(name, kind))]


def _cast_lines(name: str, kind: str) -> list[str]:
    is_needed = f"{name} is not None" if _is_list(kind) else f"{_guard(name, kind)}{name}.dtype is not _target"
    return [
        f"    if {is_needed}:",
        f"        {name} = {'cast_all' if _is_list(kind) else 'cast'}({name}, _target, _scope)",
    ]


def _is_list(kind: str) -> bool:
    return kind.startswith(("List", "Optional[List"))


def _guard(name: str, kind: str) -> str:
    if kind == "Number":
        return f"isinstance({name}, TENSOR) and "
    return f"{name} is not None and " if kind.startswith("Optional") else ""


def _dtype_lines(op: OpOverload, names: list[str], tensors: list[tuple[str, str]], passed: str) -> list[str]:
    """Return the lines of the two policies that change the call's dtype argument instead."""
    is_castable = f"{tensors[0][0]}.dtype in CASTABLE"
    if overload_name(op) in APPEND_DTYPE:
        return [
            f"if _policy is APPEND and {is_castable}:",
            "    set_excluded(KEY, True)",
            "    try:",
            f"        return call_append({passed}, dtype=FLOAT32)",
            "    finally:",
            "        set_excluded(KEY, False)",
        ]
    own = next((n for n, a in zip(names, op._schema.arguments, strict=True) if a.name == "dtype"), None)
    if own is None or _is_list(tensors[0][1]):
        return []
    return [f"if _policy is SET_OPT and {own} is None and {is_castable}:", f"    {own} = FLOAT32"]


def _in_place_body(tensors: list[tuple[str, str]]) -> list[str]:
    """Return the lines that refuse the tensor written to, or cast the other arguments to its dtype."""
    (written, _), *others = tensors
    lines = [f"if _policy is BANNED: target_of(_policy, _lower, ({written},))"]
    if not others:
        return lines
    lines += [f"_target = {written}.dtype", "if _policy is PROMOTE and _target in CASTABLE:"]
    return [*lines, *(line for name, kind in others for line in _cast_lines(name, kind))]
