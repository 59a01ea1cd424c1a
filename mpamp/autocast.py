"""The region: where, on which device and to which dtype ops are cast. Enter, exit, nest, decorate."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeVar, overload

import torch

from . import scope as _scope
from .castcache import PERSISTENT_CACHE, REGION_CACHE
from .compiling import Contexts, left_out_by_itself, run_while_tracing, traced
from .decorating import decorate
from .errors import MpampWarning, RegionError, UnsupportedDtypeError
from .optable import OpTable
from .policy import CastPolicy
from .scope import DEFAULT_MARK, NO_MARK

__all__ = ["Region", "autocast"]

F = TypeVar("F", bound=Callable[..., Any])
Ops = Mapping[str, Any] | OpTable | None

_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded
_get_dtype = torch.get_autocast_dtype
_set_dtype = torch.set_autocast_dtype
_get_cache = torch.is_autocast_cache_enabled
_set_cache = torch.set_autocast_cache_enabled
_thread = _scope.THREAD
_graph_task = torch._C._current_graph_task_id
_FIRST_KEY = _scope.FIRST_KEY
_compiler = torch.compiler
is_dynamo_compiling = torch.compiler.is_dynamo_compiling


class _Spec:
    """What one set of arguments of ``autocast`` means; shared by all regions that have them."""

    __slots__ = (
        "args",
        "device",
        "dtype",
        "enabled",
        "index",
        "is_quick",
        "key",
        "scope",
        "table",
        "type",
        "version",
    )

    def __init__(
        self, device: str | None, dtype: torch.dtype | None, enabled: bool, cache: bool, ops: Ops, persistent: bool
    ) -> None:
        from .registry import device_state

        self.device = device_state(_device_type(device))
        self.type, self.key, self.index = self.device.type, self.device.key, self.device.index
        self.version = self.device.version
        self.args = (self.type, dtype, enabled, cache, ops, persistent)
        self.enabled = bool(enabled)
        self.dtype = _check_dtype(self.device, dtype) if self.enabled else torch.float32
        self.table = None if ops is None else self.device.table_for(ops)
        mark = _scope.compose_mark(_scope.NO_MARK, self.type, self.table)
        table = self.device.table if self.table is None else self.table
        self.scope = _scope.Scope(table, None if not cache else PERSISTENT_CACHE if persistent else REGION_CACHE, mark)
        self.is_quick = False
        """Whether a region can be entered without asking anything first."""

    def is_stale(self) -> bool:
        """Tell whether the device's rules have changed since."""
        return self.version != self.device.version

    def prepare(self) -> bool:
        """Install what the region needs; tell whether it casts anything on this machine."""
        if not self.enabled:
            return False
        is_available = self.device.backend.is_available()
        if not is_available and not _is_fake(self.type):
            return False
        from .kernels import install

        install(self.device, self.scope.table, self.dtype)
        if is_available and not self.device.is_being_overtaken():
            self.is_quick = True
            self.device.quick_specs.append(self)
        return True

    def scope_in(self, outer: int) -> _scope.Scope:
        """Return the scope of a region nested in one with a table of its own, or entered in a backward pass."""
        mark = _scope.compose_mark(outer, self.type, self.table)
        return _scope.Scope(self.scope.table, self.scope.cache, mark, _graph_task())


_regions: dict[Any, Region] = {}
_plain: dict[tuple[str | torch.device, torch.dtype | None], Region] = {}
_warned: set[str] = set()


def _device_type(device: str | torch.device | None) -> str:
    if device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if accelerator is None else accelerator.type
    if isinstance(device, torch.device):
        return device.type
    if isinstance(device, str):
        return device.partition(":")[0]
    hint = "; write @mpamp.autocast() with parentheses" if callable(device) else ""
    raise TypeError(f"device is a str, a torch.device or None, got {type(device).__name__}{hint}.")


def _check_dtype(device: Any, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None:
        return device.backend.default_dtype  # type: ignore[no-any-return]
    allowed = (*device.backend.lower_precision_dtypes, torch.float32)
    if dtype not in allowed:
        raise UnsupportedDtypeError(
            f"regions on {device.type!r} run in {', '.join(map(str, allowed))}; {dtype!r} was asked for."
        )
    return dtype


@left_out_by_itself
def autocast(
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool = True,
    *,
    ops: Ops = None,
    persistent_cache: bool = False,
) -> Region:
    """Return a region in which eligible ops of one device run in lower precision, or in float32, by its op table.

    Use it in a ``with`` statement or as a decorator of functions, generators, async functions and async
    generators. It may be nested, entered again while it is open, and shared by threads.

    Args:
        device: The device type; an index is dropped. None is the current accelerator, else the CPU.
        dtype: float32 arguments of the table's lower-precision ops become this. None is the device's
            default: float16 on CUDA, bfloat16 on XPU and the CPU. float32 runs those ops in float32.
        enabled: False runs everything in the dtypes that it is called with.
        cache_enabled: Whether a weight's cast is kept until the weight changes or the outermost region ends.
        ops: Rules for this region only, on top of the device's table, such as ``{"softmax": "fp32"}``;
            or a whole ``OpTable``. Nested regions don't inherit them.
        persistent_cache: Keep casts of weights after the region too, until the weight changes or goes away.

    Raises:
        UnknownDeviceError: No backend covers the device.
        UnsupportedDtypeError: The backend can't run regions in ``dtype``.
        OpTableError: A rule in ``ops`` is wrong.

    Example:
        >>> a = torch.ones(2, 2)
        >>> with autocast("cpu", dtype=torch.bfloat16):
        ...     print((a @ a).dtype, (a @ a).softmax(0).dtype)
        torch.bfloat16 torch.bfloat16
        >>> with autocast("cpu", ops={"softmax": "fp32"}):
        ...     print((a @ a).softmax(0).dtype)
        torch.float32
    """
    if is_dynamo_compiling() or _compiler._is_compiling_flag:
        return traced(_traced_contexts(device, dtype, enabled, ops))  # type: ignore[return-value]
    if device is None:
        device = _device_type(None)
    if enabled is True and cache_enabled is True and ops is None and persistent_cache is False:
        region = _plain.get((device, dtype))
        if region is None:
            region = _plain[device, dtype] = _region_of(device, dtype, True, True, None, False)
        return region
    return _region_of(device, dtype, enabled, cache_enabled, ops, persistent_cache)


def _region_of(device: Any, dtype: Any, enabled: bool, cache: bool, ops: Ops, persistent: bool) -> Region:
    key = (device, dtype, enabled, cache, None if ops is None else _hashable(ops), persistent)
    region = _regions.get(key)
    if region is None:
        region = _regions[key] = Region(_Spec(device, dtype, enabled, cache, ops, persistent))
    return region


def forget_regions(device_type: str) -> None:
    """Have ``autocast`` make its regions of a device anew: another backend decides what they may be."""
    made: dict[Any, Region]
    for made in (_regions, _plain):
        for key in [key for key, region in made.items() if region.device_type == device_type]:
            del made[key]


def _hashable(ops: Any) -> Any:
    if isinstance(ops, Mapping) and not isinstance(ops, OpTable):
        return frozenset((op, rule if isinstance(rule, str) else repr(rule)) for op, rule in ops.items())
    return ops if isinstance(ops, OpTable) else repr(ops)


class Region:
    """An autocast region, made by ``autocast``; holds no state, so it can be shared and entered again."""

    __slots__ = ("__weakref__", "_spec")

    def __init__(self, spec: _Spec) -> None:
        self._spec = spec

    @property
    def device_type(self) -> str:
        """The device type that the region casts on."""
        return self._spec.type

    @property
    def dtype(self) -> torch.dtype:
        """What lower-precision ops run in; float32 where the region is disabled."""
        return self._spec.dtype

    @property
    def enabled(self) -> bool:
        """Whether the region casts at all."""
        return self._spec.enabled

    def __enter__(self) -> Region:
        spec = self._spec
        if not spec.is_quick:
            if spec.is_stale():
                spec = self._spec = _Spec(*spec.args)
            if not spec.prepare():
                return self._enter_disabled(spec)
        state, key, scope, index = _thread.state, spec.key, spec.scope, spec.index
        entries, scopes = state.entries, state.scopes
        if _graph_task() != -1 or (entries and entries[-1][1] > DEFAULT_MARK):
            mark = _scope.read_mark()
            scope = spec.scope_in(mark)
        else:
            mark = entries[-1][1] if entries else NO_MARK
        dtype, inner = _get_dtype(spec.type), scope.mark
        if spec.dtype is not dtype:
            _set_dtype(spec.type, spec.dtype)
        span = _scope.open_span(spec.type, scope) if inner > DEFAULT_MARK or mark > DEFAULT_MARK else None
        entries.append((self, inner, key, _is_excluded(key), spec, mark, scopes[index], dtype, _get_cache(), span))
        scopes[index] = scope
        _set_excluded(key, False)
        _set_cache(False)
        if mark != inner:
            if mark == NO_MARK and inner == DEFAULT_MARK:
                _set_excluded(_FIRST_KEY, False)
            else:
                _scope.write_mark(mark, inner)
        return self

    def _enter_disabled(self, spec: _Spec) -> Region:
        """Switch autocast off; or, on a device that isn't on this machine, do nothing."""
        key, entries = None if spec.enabled else spec.key, _thread.state.entries
        mark = entries[-1][1] if entries else _scope.read_mark()
        excluded = key is not None and _is_excluded(key)
        entries.append((self, mark, key, excluded, None, mark, None, None, None, None))
        if key is not None:
            _set_excluded(key, True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        state = _thread.state
        entries = state.entries
        saved = entries.pop() if entries and entries[-1][0] is self else _take(self, entries)
        _, inner, key, excluded, spec, mark, outer, dtype, cache, span = saved
        if key is not None:
            _set_excluded(key, excluded)
        if spec is not None:
            _set_dtype(spec.type, dtype)
            _set_cache(cache)
            if mark != inner:
                if mark == NO_MARK and inner == DEFAULT_MARK:
                    _set_excluded(_FIRST_KEY, True)
                else:
                    _scope.write_mark(inner, mark)
            state.scopes[spec.index] = outer
        if span is not None:
            span.close()
        if not entries and state.casts:
            state.casts.clear()

    @overload
    def __call__(self, function: F) -> F: ...
    @overload
    def __call__(self, function: Any) -> Any: ...
    def __call__(self, function: Any) -> Any:
        """Return ``function`` with its body run in this region, whenever it runs.

        Raises:
            TypeError: It isn't callable, or it is a class.
        """
        return decorate(function, functools.partial(_rebuild, *self._spec.args))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self._spec.args

    def __repr__(self) -> str:
        spec = self._spec
        state = str(spec.dtype) if spec.enabled else "disabled"
        return f"<mpamp region on {spec.device.type}: {state}, table {spec.scope.table.name!r}>"


@left_out_by_itself
def _rebuild(device: str, dtype: Any, enabled: bool, cache: bool, ops: Ops, persistent: bool) -> Region:
    return autocast(device, dtype, enabled, cache, ops=ops, persistent_cache=persistent)


def _is_fake(device_type: str) -> bool:
    """Tell whether tensors of an absent device can exist here; warn, once, where they can't."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return True
    if device_type not in _warned:
        _warned.add(device_type)
        warnings.warn(
            f"device {device_type!r} is not available on this machine: autocast regions for it do nothing.",
            MpampWarning,
            stacklevel=4,
        )
    return False


_KEY, _EXCLUDED, _SPEC, _MARK, _OUTER, _DTYPE, _CACHE, _SPAN = range(2, 10)


def _take(region: Region, entries: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Take out the entry of a region that isn't left in the reverse order; what is on now stays on.

    What it would have restored is handed to the regions entered since, which restore it when they are left.
    Returns the entry with what is still its own to restore.
    """
    index = next((i for i in range(len(entries) - 1, -1, -1) if entries[i][0] is region), None)
    if index is None:
        raise RegionError("a region was left on a thread that had not entered it; its own thread still has it open.")
    left = list(entries.pop(index))
    for later in range(index, len(entries)):
        heir = list(entries[later])
        if left[_SPEC] is not None and heir[_SPEC] is not None and left[_CACHE] is not None:
            # The mark and torch's cache flag are the thread's, whatever the device.
            heir[_MARK], heir[_CACHE], left[_CACHE] = left[_MARK], left[_CACHE], None
            left[_MARK] = left[1] = heir[1]
        if heir[_KEY] is left[_KEY] and heir[_KEY] is not None:
            heir[_EXCLUDED] = left[_EXCLUDED]
            if heir[_SPEC] is not None and left[_SPEC] is not None:
                heir[_OUTER], heir[_DTYPE] = left[_OUTER], left[_DTYPE]
                left[_SPEC] = None
            left[_KEY] = None
        entries[later] = tuple(heir)
    if left[_SPEC] is not None and left[_CACHE] is None:
        left[_CACHE] = _get_cache()
    return tuple(left)


@run_while_tracing
def _traced_contexts(device: str | torch.device | None, dtype: torch.dtype | None, enabled: bool, ops: Ops) -> Contexts:
    """Return the torch.autocast regions that carry a region of ours through a program."""
    from .kernels import install

    spec = _region_of(device, dtype, enabled, True, ops, False)._spec
    if spec.is_stale():
        spec = _Spec(*spec.args)
    if not spec.enabled:
        return ((spec.device.type, spec.device.backend.default_dtype, False),)
    table, run_dtype = spec.table, spec.dtype
    if run_dtype is torch.float32:
        # torch.autocast takes no float32 on most devices: say it by the table instead.
        lower = {op: "fp32" for op, row in spec.scope.table.items() if CastPolicy.LOWER_PRECISION_FP in row.policies()}
        table, run_dtype = spec.scope.table.override(lower, source="float32"), spec.device.backend.default_dtype
    mark = _scope.compose_mark(_scope.read_mark(), spec.device.type, table, is_compiled=True)
    install(spec.device, spec.scope.table if table is None else table, run_dtype)
    return ((spec.device.type, run_dtype, True), *_scope.mark_contexts(mark))
