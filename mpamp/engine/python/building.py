"""Builds the kernel of one op on one device: the source that ``codegen`` writes, and its globals."""

from __future__ import annotations

import functools
import linecache
import math
import weakref
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.autograd import forward_ad

from ...devices.state import DeviceState
from ...oplists import families
from ...rules.eligibility import PARAMETERS, WRITTEN, find_overload, overload_name
from ...rules.policy import CASTABLE, LARGEST, CastPolicy, target_dtype
from ...rules.rows import APPEND_DTYPE
from ...torch_internals import (
    DispatchKey,
    OpOverload,
    dispatch_keyset_full_after,
    dispatch_tls_is_dispatch_key_excluded,
    dispatch_tls_set_dispatch_key_excluded,
    linear,
    peek_interpreter_stack,
)
from ..compiling import left_out_by_itself
from ..losses import fused
from ..observing import OBSERVERS, Call, is_inside_unlisted, telling_call
from ..resolving import resolve as _resolve
from ..scope import THREAD, Scope, ThreadState, graph_task, mode_depth
from .caster import caster, keeper, returns_new, telling_caster
from .codegen import is_normalization, kernel_source, names_of
from .unlisted import is_unlisted
from .wrapping import wrap

__all__ = ["Kernel", "Nowhere", "build", "even", "run_below", "write_anew"]

_TORCH = "mm bmm addmm baddbmm addbmm matmul mv addmv prelu cat stack"
_FAST: dict[str, Callable[..., Any]] = {
    "aten::linear": linear,
    **{f"aten::{name}": getattr(torch, name) for name in _TORCH.split(" ")},
    **{f"aten::conv{n}d{overload}": getattr(torch, f"conv{n}d") for n in (1, 2, 3) for overload in ("", ".padding")},
}
"""Bindings that reach the same overload sooner than ``torch.ops`` does."""

Kernel = Callable[..., Any]
Resolve = Callable[[DeviceState], "Scope | None"]
set_excluded = dispatch_tls_set_dispatch_key_excluded
_VIEWS = DispatchKey.ADInplaceOrView
"""Autograd's C++ kernels switch this key off for what they call, and only they do."""


class Nowhere:
    """Stands for a thread without open regions, so that ``resolve`` alone gives a kernel its scope."""

    state = ThreadState()


def build(
    device: DeviceState,
    op: OpOverload,
    *,
    outside: Kernel,
    absent: Callable[..., Any],
    call: Kernel | None = None,
    torchs: CastPolicy | None = None,
    thread: Any = THREAD,
    resolve: Resolve = _resolve,
    may_tell: bool = True,
) -> Kernel:
    """Return the kernel of one op at a device's Autocast key; it is written when it is first called.

    Args:
        device: The device whose key it will be installed at.
        op: The overload.
        outside: What runs where no region of ours decides: torch's own kernel, or what is below.
        absent: What runs in a scope whose table gives the op no policy; it is given the scope first.
        call: What runs the op once its arguments are cast; None is the op itself, from the top. If one is given,
            it and the two above take numbers in the place of tensors.
        torchs: The policy that ``outside`` follows, where it is one that calls may be left to.
        thread: Where the kernel looks for the scope first.
        resolve: What it asks where that doesn't settle it.
        may_tell: Whether observers are told of its calls.
    """

    def write(observed: bool) -> FunctionType:
        observed = observed and may_tell
        run = call or _FAST.get(overload_name(op), op._op)
        # What is handed on to somebody else's function goes by that alone.
        from_16_bits = fused(overload_name(op), device.backend) if call is None else None
        environment = {
            **_constants(device, op),
            **_functions(device, op, run),
            **(_telling(device, op, run) if observed else {}),
            "_TORCHS": torchs,
            "_thread": thread,
            "_resolve": resolve,
            "_outside": outside,
            "_absent": absent,
            "_fused": from_16_bits,
        }
        name = overload_name(op)
        minds_sparse = name in _PRODUCTS and not device.backend.has_sparse_lower_precision
        source = kernel_source(
            op,
            None if observed else torchs,  # what torch's kernel casts can't be seen
            wraps=call is None,
            minds_sparse=minds_sparse,
            is_fused=from_16_bits is not None,
            observed=observed,
        )
        file = f"<mpamp kernel {device.type} {name}>"
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        exec(_compiled(source), environment)
        kernel: FunctionType = environment["kernel"]
        kernel.__code__ = kernel.__code__.replace(co_filename=file, co_name=name)  # for profilers and tracebacks
        return left_out_by_itself(kernel)

    return _by_keyword(op, _when_called(write))


@left_out_by_itself
def _stub(*args: Any, **kwargs: Any) -> Any:
    return _become(args, kwargs)  # type: ignore[name-defined]  # noqa: F821


def _when_called(write: Callable[[bool], FunctionType]) -> Kernel:
    """Return a function that becomes what ``write`` returns when it is first called."""
    environment: dict[str, Any] = {}
    kernel = FunctionType(_stub.__code__, environment)

    def become(args: Any, kwargs: Any) -> Any:
        while True:
            observed = bool(OBSERVERS.all)
            written = write(observed)
            environment.update(written.__globals__)
            kernel.__defaults__, kernel.__kwdefaults__ = written.__defaults__, written.__kwdefaults__
            kernel.__code__ = written.__code__  # last: another thread may be calling it
            if observed is bool(OBSERVERS.all):  # else it may have been written anew meanwhile, and this undid that
                return kernel(*args, **kwargs)

    environment["_become"] = become
    number = id(kernel)
    _kernels[number] = weakref.ref(kernel, lambda _: _kernels.pop(number, None))
    return kernel


_kernels: dict[int, weakref.ref[FunctionType]] = {}
"""Every kernel that there is."""


def write_anew() -> None:
    """Have every kernel be written again when it is next called: observing has begun or ended."""
    for ref in list(_kernels.values()):
        kernel = ref()
        if kernel is not None:
            kernel.__code__ = _stub.__code__


def _constants(device: DeviceState, op: OpOverload) -> dict[str, Any]:
    return {
        **{f"_D{i}": a.default_value for i, a in enumerate(op._schema.arguments)},
        "_OP": overload_name(op),
        "_TYPE": device.type,
        "_KEY": device.key,
        "_INDEX": device.index,
        "_device": device,
        "_LOWER": CastPolicy.LOWER_PRECISION_FP,
        "_PROMOTE": CastPolicy.PROMOTE,
        "_BANNED": CastPolicy.BANNED,
        "_FP32": CastPolicy.FP32,
        "_SET_OPT": CastPolicy.FP32_SET_OPT_DTYPE,
        "_APPEND": CastPolicy.FP32_APPEND_DTYPE,
        "_TENSOR": torch.Tensor,
        "_FLOAT32": torch.float32,
        "_FLOAT64": torch.float64,
        "_forward_ad": forward_ad,
        "_even": even,
        "_CASTABLE": CASTABLE,
        "_VIEWS": _VIEWS,
        "_graph_task": graph_task,
        "_mode_depth": mode_depth,
        "_is_overlaid": torch.is_autocast_cache_enabled,  # a region turns it off; a compiled program's regions, on
        "_is_excluded": dispatch_tls_is_dispatch_key_excluded,
        "_is_in_a_kernel": _is_in_a_kernel,
        "_get_dtype": torch.get_autocast_dtype,
        "_set_excluded": set_excluded,
        "_knows": _knows,
        "_policy_of_sparse": _policy_of_sparse,
        "_wrap": wrap,
        "_isinstance": isinstance,
    }


def _functions(device: DeviceState, op: OpOverload, call: Kernel) -> dict[str, Any]:
    name = overload_name(op)
    may_keep, kept = keeper(device.backend)
    return {
        "_target_of": _target_of(device, name),
        "_unless_double": _unless_double,
        "_may_keep": may_keep,
        "_kept": kept,
        **_casting(device, op, call, caster),
    }


def _casting(device: DeviceState, op: OpOverload, call: Kernel, make: Callable[..., Any]) -> dict[str, Any]:
    name = overload_name(op)
    cast, cast_apart = make(device.backend, keep=returns_new(op)), make(device.backend, keep=False)
    append = find_overload(APPEND_DTYPE[name]) if name in APPEND_DTYPE else None

    def cast_all(tensors: Any, target: torch.dtype, scope: Scope) -> list[Any]:
        one = cast if len(tensors) > 1 else cast_apart  # a product of one tensor may be a view of it
        return [t if t is None else one(t, target, scope) for t in tensors]

    return {
        "_cast": cast,
        "_cast_all": cast_all,
        "_call": call,
        "_call_append": None if append is None else append._op,
        "_normalize": _normalizer(device, op, call) if is_normalization(op) else None,
    }


def _telling(device: DeviceState, op: OpOverload, call: Kernel) -> dict[str, Any]:
    """Return what an observed kernel uses instead."""
    slots = [
        (i, a.name if a.kwarg_only else None) for i, a in enumerate(op._schema.arguments) if "Tensor" in str(a.type)
    ]
    found = _casting(device, op, telling_call(call, slots), telling_caster)
    if found["_call_append"] is not None:
        found["_call_append"] = telling_call(found["_call_append"], slots)
    name = overload_name(op)
    is_always = is_unlisted(name)

    def is_untold(scope: Scope) -> bool:
        # What an op that isn't listed is made of isn't told either, nor one with a kernel for rules of regions past.
        return is_inside_unlisted() or not (is_always or scope.table.get(name))

    return {"_Call": Call, "_is_untold": is_untold, **{f"{name}_told": found[name] for name in found}}


@functools.cache
def _compiled(source: str) -> CodeType:
    return compile(source, "<mpamp kernel>", "exec")


def _by_keyword(op: OpOverload, kernel: Kernel) -> Kernel:
    """Return a kernel that takes the op's own keywords."""
    names, by_position = names_of(op)
    if not by_position:
        return kernel
    own = {a.name: name for a, name in zip(op._schema.arguments, names, strict=True) if a.kwarg_only}

    def renaming(keys: Any, /, *args: Any, **kwargs: Any) -> Any:
        return kernel(keys, *args, **{own[name]: value for name, value in kwargs.items()})

    return left_out_by_itself(renaming)


def run_below(device: DeviceState, op: OpOverload) -> Kernel:
    """Return what runs an op as if its Autocast key had no kernel: what it is made of is autocast."""
    after, redispatch = dispatch_keyset_full_after(device.key), op._handle.redispatch_boxed
    return lambda keys, /, *args, **kwargs: redispatch(keys & after, *args, **kwargs)


def even(value: Any, target: torch.dtype) -> Any:
    """Return a tensor of ``target``'s dtype whose tangent has that dtype too; anything else as it is.

    A normalization gives a lower-precision result with a tangent in float32, if its weights are. A cast's derivative
    casts: at levels of ``torch.func``, which don't show what they hold, one is made that may be to the same dtype.
    """
    if not isinstance(value, torch.Tensor) or value.dtype is not target:
        return value
    if peek_interpreter_stack() is None:
        tangent = forward_ad.unpack_dual(value).tangent
        if tangent is None or tangent.dtype is target:
            return value
    return torch.ops.aten._to_copy.default(value, dtype=target)


def _is_in_a_kernel() -> bool:
    """Tell whether autograd's kernel is what is running: functorch's levels switch that key off, too.

    A kernel in C++ takes what it calls to have the dtypes that it asked for: ``unique`` reads what ``sort`` gives it.
    """
    return peek_interpreter_stack() is None


def _target_of(device: DeviceState, name: str) -> Callable[..., torch.dtype | None]:
    on_device = device.backend.tensor_check()

    def target_of(
        policy: CastPolicy | None, lower: torch.dtype, tensors: Iterable[Any], numbers: Iterable[Any] = ()
    ) -> torch.dtype | None:
        flat = [t for item in tensors for t in (item if isinstance(item, list | tuple) else (item,))]
        flat = [t for t in flat if isinstance(t, torch.Tensor)]
        if any(t.dtype is torch.float64 for t in flat):
            return None
        dtypes = [t.dtype for t in flat if t.dtype in CASTABLE and on_device(t)]
        if not all(_holds(dtype, number) for number in numbers for dtype in dtypes):
            dtypes.append(torch.float32)
        return target_dtype(policy, name, lower, dtypes)

    return target_of


def _unless_double(parameter: Any) -> Any:
    """Return an op's parameter, but None for a float64 one: such don't count."""
    return None if isinstance(parameter, torch.Tensor) and parameter.dtype is torch.float64 else parameter


_SPARSE = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
_PRODUCTS = {f"aten::{name}" for family in ("matmul", "matvec") for name in families()[family]}
"""Ops that take sparse tensors."""


def _holds(dtype: torch.dtype, number: Any) -> bool:
    return not isinstance(number, int | float) or abs(number) <= LARGEST[dtype] or not math.isfinite(number)


def _policy_of_sparse(policy: CastPolicy, tensors: Iterable[Any]) -> CastPolicy:
    """Return the policy of a product on a device without 16-bit kernels for two sparse tensors or a compressed one."""
    layouts = [t.layout for t in tensors if isinstance(t, torch.Tensor) and t.layout in _SPARSE]
    is_missing = len(layouts) > 1 or (layouts and layouts[0] is not torch.sparse_coo)
    return CastPolicy.FP32 if is_missing and policy is CastPolicy.LOWER_PRECISION_FP else policy


def _knows(lower: torch.dtype, tensors: Iterable[Any]) -> bool:
    """Tell whether torch's promote takes a call: it raises on a dtype that is neither float32 nor the region's."""
    for item in tensors:
        for tensor in item if isinstance(item, list | tuple) else (item,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype is not lower and tensor.dtype is not torch.float32:
                return False
    return True


def _normalizer(device: DeviceState, op: OpOverload, call: Kernel) -> Kernel:
    """Return what runs a normalization whose input is cast already.

    Its parameters and running statistics stay if they all have the input's dtype, and are float32 otherwise;
    statistics that were cast are written back.
    """
    names = [a.name for a in op._schema.arguments]
    slots = [i for i, name in enumerate(names) if name in PARAMETERS]
    is_training = next((names.index(n) for n in ("training", "train", "use_input_stats") if n in names), None)
    on_device = device.backend.tensor_check()

    def normalize(target: torch.dtype | None, *args: Any, **kwargs: Any) -> Any:
        group = {i: args[i] for i in slots if args[i] is not None and args[i].dtype in CASTABLE and on_device(args[i])}
        if target is None or all(t.dtype is target for t in group.values()):
            return call(*args, **kwargs)
        cast = {i: t.to(torch.float32) for i, t in group.items()}
        result = call(*(cast.get(i, a) for i, a in enumerate(args)), **kwargs)
        if is_training is None or args[is_training]:
            for i, t in group.items():
                if names[i] in WRITTEN and cast[i] is not t:
                    t.copy_(cast[i])
        return result

    return normalize
