"""Regions in programs that ``torch.export`` traces: the casts are in the graph, and hold in every process.

Export records ops at the PreDispatch key, above the Autocast keys, and writes a ``torch.autocast`` into its program
for these to cast when it runs; the op tables would be those of the process that it runs in. So a region of ours is
really entered while export traces, and an op takes the way that it takes in eager code, through the kernel at its
Autocast key, with the recording still on: what that kernel casts and what it calls is what is recorded.
The program itself holds a disabled ``torch.autocast`` around them, for regions that it may be run in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ..devices.registry import DeviceState, devices_in_use
from ..engine import is_native
from ..engine.marks import CARRIERS
from ..engine.resolving import resolve
from ..engine.scope import THREAD
from ..rules.eligibility import overload_name
from ..rules.policy import CASTABLE, CastPolicy
from ..torch_internals import (
    DisableTorchFunction,
    HigherOrderOperator,
    OpOverload,
    PreDispatchTorchFunctionMode,
    ProxyTorchDispatchMode,
    TorchDispatchModeKey,
    autograd_would_have_decomposed,
    dispatch_keys,
    dispatch_tls_is_dispatch_key_excluded,
    enter_autocast,
    exit_autocast,
    get_current_function_mode_stack,
    get_dispatch_mode,
    set_grad_enabled,
    tree_leaves,
    tree_map_only,
)

__all__ = ["record_enter", "record_exit", "serve_export"]

_ENTER, _EXIT = enter_autocast, exit_autocast
_OPEN = "_mpamp_regions"
_SHIELD = "mpamp_shield"
_is_excluded = dispatch_tls_is_dispatch_key_excluded
_function: Any = PreDispatchTorchFunctionMode.__torch_function__
_exit: Any = PreDispatchTorchFunctionMode.__exit__
_dispatch: Any = ProxyTorchDispatchMode.__torch_dispatch__


def serve_export() -> None:
    """Have export's tracers ask for regions; called once, at the first region, for it may be around the export."""
    PreDispatchTorchFunctionMode.__torch_function__ = _record_regions  # type: ignore[method-assign]
    PreDispatchTorchFunctionMode.__exit__ = _leave_regions  # type: ignore[method-assign]
    ProxyTorchDispatchMode.__torch_dispatch__ = _record_casts  # type: ignore[method-assign]


# -- Regions -----------------------------------------------------------------------------------------


def record_enter(device: DeviceState, enabled: bool) -> None:
    """Tell the tracer of the program that this thread exports of a region that is being entered."""
    settings = (device.type, device.backend.default_dtype, False, True)
    tracer = _tracer()
    if enabled:
        _shield(tracer, settings)
    else:
        tracer.__torch_function__(_ENTER, (), settings)


def record_exit() -> None:
    """Tell it that the region is being left."""
    _tracer().__torch_function__(_EXIT, (), ())


def _tracer() -> Any:
    return next(m for m in get_current_function_mode_stack() if isinstance(m, PreDispatchTorchFunctionMode))


def _record_regions(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if func is _ENTER:
        # What Dynamo wrote into its graph is being run, with the tracer off its stack; the state isn't set then.
        is_replayed = not any(mode is self for mode in get_current_function_mode_stack())
        if is_replayed and (args[0] in CARRIERS.names or _is_ours(args[0])):
            return _Replayed(self, args)
        if not is_replayed and _is_ours(args[0]):
            return _shield(self, args)
    elif func is _EXIT:
        if args and isinstance(args[0], _Replayed):
            return args[0].exit()
        if not _is_to_be_recorded(self.enter_autocast_nodes):
            return self.enter_autocast_nodes.pop()
    return _function(self, func, types, args, kwargs)


def _leave_regions(self: Any, *error: Any) -> Any:
    result, cache = _exit(self, *error), torch.is_autocast_cache_enabled()
    while self.__dict__.get(_OPEN):  # where an error ended the tracing
        self.__dict__[_OPEN][-1].leave()
    torch.set_autocast_cache_enabled(cache)  # make_fx has put it back by now
    return result


def _is_ours(device_type: str) -> bool:
    """Tell whether ops of a device type are autocast by a table of ours in the calling thread."""
    device = next((d for d in devices_in_use() if d.type == device_type), None)
    return device is not None and resolve(device) is not None


def _shield(tracer: Any, settings: tuple[Any, ...]) -> None:
    """Record that autocast is off from here on, unless the program has that already."""
    device_type, dtype, _, cache = settings
    nodes = [n for n in tracer.enter_autocast_nodes if n is not None and n.args[0] == device_type]
    if nodes and not nodes[-1].args[2]:
        tracer.enter_autocast_nodes.append(None)
    else:
        node = _function(tracer, _ENTER, (), (device_type, dtype, False, cache))
        node.meta[_SHIELD] = True


def _is_to_be_recorded(entered: list[torch.fx.Node | None]) -> bool:
    """Tell whether leaving the latest region is, and take what was recorded of it out where it must not be."""
    node = entered[-1] if entered else None
    if node is None:
        return not entered
    nodes = list(node.graph.nodes)
    if node.meta.pop(_SHIELD, False) and any(_has_graphs(n.target) for n in nodes[nodes.index(node) :]):
        node.graph.erase_node(node)  # a program with other graphs inside of a torch.autocast can't be saved and loaded
        return False
    return True


def _has_graphs(target: Any) -> bool:
    return isinstance(target, HigherOrderOperator) or target is set_grad_enabled


class _Replayed:
    """A region in Dynamo's graph, entered while that is traced again."""

    def __init__(self, tracer: Any, settings: tuple[Any, ...]) -> None:
        device_type, dtype, enabled, _ = settings
        self._tracer, self._is_carrier = tracer, device_type in CARRIERS.names
        self._region = torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=False)
        self._region.__enter__()
        tracer.__dict__.setdefault(_OPEN, []).append(self)
        if not self._is_carrier:
            _shield(tracer, settings)

    def exit(self) -> None:
        if not self._is_carrier:
            self._tracer.__torch_function__(_EXIT, (), ())
        self.leave()

    def leave(self) -> None:
        self._tracer.__dict__[_OPEN].remove(self)
        self._region.__exit__(None, None, None)


# -- Ops ---------------------------------------------------------------------------------------------


def _record_casts(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    device = _device_of(func, args, kwargs) if self.pre_dispatch else None
    if device is not None:
        if _has_kernel(device, func):
            with self, _in_kernel(device):
                return func._op_dk(device.key, *args, **kwargs)
        if _casts_inside(func, args, kwargs):
            with self:
                if func is torch.ops.aten.lstm.input:
                    return _in_shape(args[1], *func.decompose(*_as_one_layer(device, args), **kwargs))
                return func.decompose(*args, **kwargs)
    return _dispatch(self, func, types, args, kwargs)


_ONE_LAYER = "aten::mkldnn_rnn_layer"


def _as_one_layer(device: DeviceState, args: Any) -> Any:
    """Return the arguments of an LSTM as eager code runs it: by one op a layer, where the device has that op.

    Programs have its steps in that op's place, which would be cast by rows of their own.
    """
    x, states, weights, *rest = args
    scope, lower = resolve(device), torch.get_autocast_dtype(device.type)
    policy = None if scope is None else scope.rules[lower].get(_ONE_LAYER)
    has_projection = states[0].shape[-1] != states[1].shape[-1]
    if policy is not CastPolicy.LOWER_PRECISION_FP or has_projection or not is_native(device, _ONE_LAYER):
        return args
    if not all(t.dtype in CASTABLE for t in (x, *states, *weights)):
        return args
    return x.to(lower), [t.to(lower) for t in states], [t.to(lower) for t in weights], *rest


def _in_shape(states: Any, output: torch.Tensor, *last: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return what an LSTM gives, its last states in the shape of the first: torch 2.8 adds a dimension of one."""
    return output, *(t if t.dim() == s.dim() else t.squeeze(1) for t, s in zip(last, states, strict=True))


def _device_of(func: Any, args: Any, kwargs: Any) -> DeviceState | None:
    """Return the device by whose table of ours a call is autocast now, or None."""
    active = [device for device in devices_in_use() if not _is_excluded(device.key)]
    if not active or not isinstance(func, OpOverload):
        return None
    keys = [dispatch_keys(t) for t in _tensors(args, kwargs)]
    found = [d for d in active if any(k.has(d.key) for k in keys) and resolve(d) is not None]
    return max(found, key=lambda d: d.key.value, default=None)  # the dispatcher's own order


def _tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]


def _has_kernel(device: DeviceState, func: OpOverload) -> bool:
    """Tell whether a kernel casts an op in the scope that the thread is in; it may be torch's or another library's."""
    name, scope = overload_name(func), resolve(device)
    assert scope is not None
    if scope.rules[torch.get_autocast_dtype(device.type)].get(name) is not None:
        return True
    return name in scope.table and is_native(device, name)


@contextmanager
def _in_kernel(device: DeviceState) -> Iterator[None]:
    """Keep casts out of the thread's cache and kept ones out of the program; a kernel's calls aren't the user's."""
    scopes = THREAD.state.scopes
    scope = scopes[device.index]
    if scope is not None and scope.cache is not None:
        THREAD.state.put(device.index, scope.again(scope.task))
    try:
        with DisableTorchFunction():
            yield
    finally:
        THREAD.state.put(device.index, scope)


def _is_made_of_ops(func: OpOverload, args: Any, kwargs: Any) -> bool:
    """Tell whether an op runs as others, for it has no kernel of its own on the arguments' device."""
    if not func._can_decompose():
        return False
    return autograd_would_have_decomposed is None or autograd_would_have_decomposed(func, _tensors(args, kwargs))


def _casts_inside(func: OpOverload, args: Any, kwargs: Any) -> bool:
    """Tell whether autocast casts anything in what an op without a kernel at the Autocast key is made of."""
    if not _is_made_of_ops(func, args, kwargs):
        return False
    fake_mode = get_dispatch_mode(TorchDispatchModeKey.FAKE)
    if fake_mode is None:
        return True  # as far as can be told without running it
    shapes = fake_mode.shape_env
    # Clones, for the call may write, and fake tensors remember the sizes that depend on their data.
    args, kwargs = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
    with nullcontext() if shapes is None else shapes.ignore_fresh_unbacked_symbols(), _Probe() as probe:
        func.decompose(*args, **kwargs)
    return probe.has_cast


class _Call:
    """An op and those of its arguments that a cast would have changed."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        leaves = tree_leaves((args, kwargs))
        self.func = func
        self.leaves = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor | torch.dtype)]

    def is_same(self, other: _Call) -> bool:
        return self.func is other.func and [*map(id, self.leaves)] == [*map(id, other.leaves)]


class _Probe(ProxyTorchDispatchMode):
    """Runs ops at the PreDispatch key as eager code would, and notes whether any kernel there casts."""

    def __init__(self) -> None:
        super().__init__(None, "fake", pre_dispatch=True)  # type: ignore[arg-type]
        self.has_cast = False
        self._expected: _Call | None = None
        """What a kernel that casts nothing calls first."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call, expected, self._expected = _Call(func, args, kwargs), self._expected, None
        self.has_cast = self.has_cast or (expected is not None and not call.is_same(expected))
        device = _device_of(func, args, kwargs)
        if device is None:
            return func(*args, **kwargs)
        if _has_kernel(device, func):
            self._expected = call
            with self, _in_kernel(device):
                return func._op_dk(device.key, *args, **kwargs)
        if _is_made_of_ops(func, args, kwargs):
            with self:
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)

    def __sym_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)
