"""The region: where, on which device and to which dtype ops are cast. Enter, exit, nest, decorate."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar, overload

import torch

from ..devices.listeners import LISTENERS
from ..devices.registry import device_state
from ..engine import BEFORE_FIRST_INSTALL, install
from ..engine.casts.cache import PERSISTENT_CACHE, REGION_CACHE
from ..engine.casts.checking import CHECKS_REGIONS, checked
from ..engine.compiling import (
    Contexts,
    is_dynamo_compiling,
    is_exporting,
    left_out_by_itself,
    run_while_tracing,
    traced,
)
from ..engine.entries import enter, leave
from ..engine.marks import (
    CARRIERS,
    DEFAULT_MARK,
    NO_MARK,
    Change,
    Mark,
    changes_to,
    compose_mark,
    make_way,
    read_mark,
    set_dtype,
)
from ..engine.scope import MARK, THREAD, Scope, graph_task
from ..errors import MpampWarning, RegionError, UnsupportedDtypeError
from ..rules.optable import OpTable
from ..rules.rows import parse_dtype
from ..torch_internals import (
    TorchDispatchModeKey,
    dispatch_tls_is_dispatch_key_excluded,
    dispatch_tls_set_dispatch_key_excluded,
    get_dispatch_mode,
    is_torch_function_mode_enabled,
)
from .carrying import serve_autograd
from .decorating import decorate
from .dynamo import is_known_to_dynamo, serve_dynamo
from .programs import contexts_of
from .threads import serve_data_parallel

__all__ = ["Region", "autocast", "traced_contexts"]

F = TypeVar("F", bound=Callable[..., Any])
Ops = Mapping[str, Any] | OpTable | None

_is_excluded = dispatch_tls_is_dispatch_key_excluded
_set_excluded = dispatch_tls_set_dispatch_key_excluded
_get_dtype = torch.get_autocast_dtype
_get_cache = torch.is_autocast_cache_enabled
_set_cache = torch.set_autocast_cache_enabled
_has_function_modes = is_torch_function_mode_enabled
_thread = THREAD

_NOT_READY = -1
_MOST_REGIONS = 512
_MOST_TRIES = 8
_OWN_ENTRY = 9
"""How much an ordinary region's entry keeps that was entered in Python."""


class _Spec:
    """What one set of arguments of ``autocast`` means; shared by all regions that have them."""

    __slots__ = (
        "_nested",
        "args",
        "core",
        "device",
        "dtype",
        "enabled",
        "index",
        "key",
        "ready",
        "scope",
        "table",
        "type",
        "version",
    )

    def __init__(
        self, device: str | None, dtype: torch.dtype | None, enabled: bool, cache: bool, ops: Ops, persistent: bool
    ) -> None:
        self.device = device_state(_device_type(device))
        self.device.require_known()
        self.version = self.device.version  # before the table is read, for another thread may change it
        self.ready = _NOT_READY
        """The version of the device's rules and kernels that the region can be entered at without asking anything."""
        self.type, self.key, self.index = self.device.type, self.device.key, self.device.index
        self.args = (self.type, dtype, enabled, cache, ops, persistent)
        self.enabled = bool(enabled) and not _off
        self.dtype = _check_dtype(self.device, dtype) if self.enabled else torch.float32
        default = self.device.table
        self.table = None if ops is None else self.device.table_for(ops)
        mark = compose_mark(NO_MARK, self.type, self.table)
        kept_in = None if not cache else PERSISTENT_CACHE if persistent else REGION_CACHE
        self.scope = Scope(default if self.table is None else self.table, kept_in, mark)
        self._nested: tuple[Mark, Scope] = (NO_MARK, self.scope)
        from ..engine.compiled import spec_of  # not before: it is much to import

        self.core = spec_of(self.device, self.dtype if self.enabled else None, self.scope)

    def _dtypes_in(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes to have kernels for: a region in float32 may hold torch's own regions of lower ones."""
        return self.device.backend.lower_precision_dtypes if self.dtype is torch.float32 else (self.dtype,)

    def prepare(self) -> bool:
        """Install what the region needs; tell whether it casts anything on this machine."""
        version = self.device.version
        is_available = self.device.backend.is_available()
        if not is_available and not _is_fake(self.type):
            return False
        are_complete = [install(self.device, self.scope.table, dtype) for dtype in self._dtypes_in()]
        if all(are_complete) and is_available and version == self.version and not self.device.is_being_overtaken():
            self.ready = version
        return True

    def scope_in(self, outer: Mark, task: int) -> Scope:
        """Return the scope of a region nested in one with a table of its own, or entered in a backward pass."""
        known, scope = self._nested
        if known is outer and task == -1:
            return scope
        scope = Scope(self.scope.table, self.scope.cache, compose_mark(outer, self.type, self.table), task)
        if task == -1:
            self._nested = (outer, scope)
        return scope


_regions: dict[Any, Region] = {}
_plain: dict[tuple[str | torch.device, torch.dtype | str | None, bool], Region] = {}
_warned: set[str] = set()
_off: list[None] = []
"""Not empty where all regions that are made do nothing."""


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
    dtype: torch.dtype | str | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = True,
    *,
    ops: Ops = None,
    persistent_cache: bool = False,
    device_type: str | torch.device | None = None,
) -> Region:
    """Return a region in which eligible ops of one device run in lower precision, or in float32, by its op table.

    Use it in a ``with`` statement or as a decorator of functions, generators, async functions and async
    generators. It may be nested, entered again while it is open, and shared by threads.

    Args:
        device: The device type; an index is dropped. None is the current accelerator, else the CPU.
        dtype: float32 arguments of the table's lower-precision ops become this, a dtype or its name. None is the
            device's default: float16 on CUDA, bfloat16 on XPU and the CPU. float32 runs those ops in float32.
        enabled: False runs everything in the dtypes that it is called with.
        cache_enabled: Whether a weight's cast is kept until the weight changes or the outermost region ends.
            None, torch's own default, is True.
        ops: Rules for this region only, on top of the device's table, such as ``{"softmax": "fp32"}``;
            or a whole ``OpTable``. Nested regions don't inherit them.
        persistent_cache: Keep casts of weights after the region too, until the weight changes or goes away.
        device_type: The same as ``device``, by torch's name.

    Raises:
        TypeError: Both ``device`` and ``device_type`` are given.
        UnknownDeviceError: No backend covers the device, or torch doesn't know it.
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
    if device_type is not None:
        if device is not None:
            raise TypeError("device and device_type are two names of one argument: give one of them.")
        device = device_type
    if is_dynamo_compiling():
        region = _traced_region(device, dtype, enabled, cache_enabled, ops, persistent_cache)
        return traced(traced_contexts(device, dtype, enabled, ops)) if region is None else region  # type: ignore[return-value]
    if device is None:
        device = _device_type(None)
    if cache_enabled is None:
        cache_enabled = True
    if ops is None and cache_enabled is True and persistent_cache is False and type(enabled) is bool:
        region = _plain.get((device, dtype, enabled))
        if region is None:
            region = _plain[device, dtype, enabled] = _region_of(device, dtype, enabled, True, None, False)
        return region
    return _region_of(device, dtype, enabled, cache_enabled, ops, persistent_cache)


def _region_of(device: Any, dtype: Any, enabled: bool, cache: bool, ops: Ops, persistent: bool) -> Region:
    if isinstance(dtype, str):
        dtype = parse_dtype(dtype, UnsupportedDtypeError)
    region = _regions.get((device, dtype, enabled, cache, _contents(ops), persistent))
    if region is not None:
        return region
    ops = _frozen(ops)
    key = (device, dtype, enabled, cache, _contents(ops), persistent)  # of what was copied: the user's may change
    region = _regions.get(key)
    if region is None:
        region = Region(_Spec(device, dtype, enabled, cache, ops, persistent))
        while len(_regions) >= _MOST_REGIONS:  # a region holds no state: whoever has it goes on using it
            _regions.pop(next(iter(_regions)), None)
        _regions[key] = region
    return region


@contextlib.contextmanager
def regions_off() -> Iterator[None]:
    """Have all regions that ``autocast`` gives inside, on any thread, be disabled ones: to compare with.

    Example:
        >>> with regions_off(), autocast("cpu", dtype=torch.bfloat16):
        ...     print((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        torch.float32
    """
    _off.append(None)
    _regions.clear()
    _plain.clear()
    try:
        yield
    finally:
        _off.pop()
        _regions.clear()
        _plain.clear()


def forget_regions(device_type: str) -> None:
    """Have ``autocast`` make its regions of a device anew: another backend decides what they may be."""
    made: dict[Any, Region]
    for made in (_regions, _plain):
        for key in [key for key, region in made.items() if region.device_type == device_type]:
            del made[key]


def _frozen(ops: Any) -> Any:
    """Return what ``ops=`` holds now, whatever becomes of the user's object."""
    if not isinstance(ops, Mapping) or isinstance(ops, OpTable):
        return ops
    return {op: dict(rule) if isinstance(rule, Mapping) else rule for op, rule in ops.items()}


def _contents(ops: Any) -> Any:
    if not isinstance(ops, dict):
        return ops if ops is None or isinstance(ops, OpTable) else repr(ops)
    try:
        return frozenset(ops.items())
    except TypeError:  # rules by dtype
        pass
    return frozenset((op, rule if isinstance(rule, str) else repr(rule)) for op, rule in ops.items())


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

    @property
    def keeps_casts(self) -> bool:
        """Whether casts of weights are kept in the region."""
        return bool(self._spec.args[3])

    @left_out_by_itself
    def __enter__(self) -> Region:
        spec = self._spec
        if _has_function_modes() and is_exporting():
            _exporting().record_enter(spec.device, spec.enabled)
        if spec.ready != spec.device.version:
            if not spec.enabled:
                return enter(self, [(_set_excluded, spec.key, True)])
            casts, spec = self._prepare()
            if not casts:
                return enter(self, [])
        state, task = _thread.state, graph_task()
        scopes, put, entries, flag = state.scopes, state.put, state.entries, _get_cache()
        keys = CARRIERS.keys
        if not keys or _is_excluded(keys[0]):
            outer = NO_MARK
        elif entries and not flag and scopes[MARK] is DEFAULT_MARK:
            outer = DEFAULT_MARK
        else:
            outer = read_mark(bool(entries) or task != -1)
            if outer is NO_MARK:
                make_way()
                keys = CARRIERS.keys
        key, index = spec.key, spec.index
        scope = spec.scope if task == -1 and outer.is_default else spec.scope_in(outer, task)
        mark = scope.mark
        if not (mark.is_default and outer.is_default and keys):
            if outer is NO_MARK:
                make_way()
            changes: list[Change] = [(put, index, scope), (put, MARK, mark), (set_dtype, spec.type, spec.dtype)]
            return enter(self, [*changes, *changes_to(mark), (_set_excluded, key, False)], False)
        dtype = _get_dtype(spec.type)
        is_off, before, own, is_first = _is_excluded(key), scopes[index], scopes[MARK], outer is NO_MARK
        entry: list[Any] = [self, flag, (key, is_off, spec.type, dtype, index, before, own, keys[0], is_first)]
        try:
            entries.append(entry)
            _set_cache(False)
            put(index, scope)
            put(MARK, mark)
            if spec.dtype is not dtype:
                set_dtype(spec.type, spec.dtype)
            if is_first:
                _set_excluded(keys[0], False)
            _set_excluded(key, False)
            return self
        except BaseException:
            _set_excluded(key, is_off)
            _set_excluded(keys[0], is_first)
            set_dtype(spec.type, dtype)
            put(index, before)
            put(MARK, own)
            _set_cache(flag)
            if entries and entries[-1] is entry:
                entries.pop()
            raise

    @left_out_by_itself
    def _prepare(self) -> tuple[bool, _Spec]:
        """Return whether the region casts on this machine, and what it is by the device's rules of now."""
        for _ in range(_MOST_TRIES):  # another thread may change them all the time
            spec = self._spec
            if spec.version != spec.device.version:
                spec = self._spec = _Spec(*spec.args)
            casts = spec.prepare()
            if spec.version == spec.device.version:
                break
        return casts, spec

    @left_out_by_itself
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entry: list[Any] | None = None
        try:  # before anything that an exception can strike in
            if _has_function_modes() and is_exporting():
                _exporting().record_exit()
            state = _thread.state
            entries = state.entries
            entry = entries[-1] if entries else None
            if entry is not None and entry[0] is self and type(entry[2]) is tuple and len(entry[2]) == _OWN_ENTRY:
                key, is_off, name, dtype, index, before, own, first, is_first = entry[2]
                _set_excluded(key, is_off)
                if is_first:
                    _set_excluded(first, True)
                state.put(index, before)
                state.put(MARK, own)
                set_dtype(name, dtype)
                _set_cache(entry[1])
                entries.pop()
                if not entries and state.casts:
                    state.casts.clear()
            else:
                leave(self)
        except RegionError:
            raise
        except BaseException:
            entries = _thread.state.entries
            if entries and entries[-1][0] is self and (entry is None or entries[-1] is entry):
                leave(self)
            raise

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

    def __eq__(self, other: object) -> bool:
        """Tell whether both mean the same under the rules of now: Dynamo guards on regions by value."""
        return self is other or (isinstance(other, Region) and self._value() == other._value())

    def __hash__(self) -> int:
        return hash((self._spec.type, self._spec.dtype, self._spec.enabled))

    def _value(self) -> tuple[Any, ...]:
        spec = self._spec
        _, _, _, cache, ops, persistent = spec.args
        return spec.type, spec.dtype, spec.enabled, bool(cache), _contents(ops), bool(persistent)

    def __repr__(self) -> str:
        spec = self._spec
        state = str(spec.dtype) if spec.enabled else "disabled"
        return f"<mpamp region on {spec.device.type}: {state}, table {spec.scope.table.name!r}>"


@left_out_by_itself
def _rebuild(device: str, dtype: Any, enabled: bool, cache: bool, ops: Ops, persistent: bool) -> Region:
    return autocast(device, dtype, enabled, cache, ops=ops, persistent_cache=persistent)


def _is_fake(device_type: str) -> bool:
    """Tell whether tensors of an absent device can exist here; warn, once, where they can't."""
    if get_dispatch_mode(TorchDispatchModeKey.FAKE) is not None:
        return True
    if device_type not in _warned:
        _warned.add(device_type)
        warnings.warn(
            f"device {device_type!r} is not available on this machine: autocast regions for it do nothing.",
            MpampWarning,
            stacklevel=5,
        )
    return False


def _exporting() -> Any:
    from . import exporting  # not before: it imports torch's tracers

    return exporting


def _serve_torch() -> None:
    """Have torch's checkpoints, Functions, DataParallel and export carry regions."""
    serve_data_parallel()
    serve_autograd()
    _exporting().serve_export()
    if not CHECKS_REGIONS:
        from ..engine.compiled import serve

        serve(Region)


BEFORE_FIRST_INSTALL.append(_serve_torch)
if CHECKS_REGIONS:
    Region.__enter__ = checked(Region.__enter__)  # type: ignore[method-assign]


@run_while_tracing
def traced_contexts(
    device: str | torch.device | None, dtype: torch.dtype | str | None, enabled: bool, ops: Ops
) -> Contexts:
    """Return the torch.autocast regions that carry a region of ours through a program."""
    return _contexts_of(_region_of(device, dtype, enabled, True, ops, False))


@run_while_tracing
def _traced_region(device: Any, dtype: Any, enabled: Any, cache: Any, ops: Ops, persistent: bool) -> Region | None:
    """Return a region as a constant of the program that is being made; None where Dynamo can't be told what it is."""
    region = _region_of(_device_type(device), dtype, enabled, cache is None or cache, ops, persistent)
    return region if is_known_to_dynamo() else None


def _contexts_of(region: Region) -> Contexts:
    spec = region._spec
    if spec.version != spec.device.version:
        spec = _Spec(*spec.args)
    if not spec.enabled:
        return ((spec.device.type, spec.device.backend.default_dtype, False),)
    return contexts_of(spec.device, spec.table, spec.dtype)


LISTENERS.before_first_use.append(lambda: serve_dynamo(Region, _contexts_of))
