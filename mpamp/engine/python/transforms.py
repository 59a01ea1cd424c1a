"""Kernels where an op enters ``torch.func``'s transforms, before vmap, grad or jvp take it apart.

Each level of a transform runs an op with the keys that were on when the op reached the level: a kernel at an
Autocast key that switches that key off has it on again one level below, for whatever the op is made of by
then; and vmap takes composite ops apart above the Autocast keys, which never see them. At the key that the
transforms start from, an op is seen whole and once, and what is off there is off at every level.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from ...oplists import facts
from ...rules.eligibility import WRITTEN, find_overload, overload_name
from ...rules.policy import CASTABLE
from ...torch_internals import (
    DispatchKey,
    DispatchKeySet,
    OpOverload,
    dispatch_has_kernel_for_dispatch_key,
    dispatch_tls_is_dispatch_key_excluded,
    forward_ad_level,
    get_kernel,
    tree_map_only,
)
from ..compiling import left_out_by_itself
from .building import Kernel, build, even
from .extensions import put_on_top
from .wrapping import as_tensors, number_slots

if TYPE_CHECKING:
    from ...devices.registry import DeviceState
    from ...plugins.backend import Backend

__all__ = ["UNLISTED", "install", "make_anew", "withdraw", "withdraw_apart", "withdraw_idle"]

_KEY = DispatchKey.FuncTorchDynamicLayerFrontMode
_KEYS = DispatchKeySet(_KEY)
_is_excluded = dispatch_tls_is_dispatch_key_excluded

_installed: dict[str, _Entrance] = {}
_libraries: dict[str, torch.library.Library] = {}
"""One for all of torch's ops, and one for each of others, which may be defined anew."""


_MADE_OF_ROWS = "inner bilinear kron cosine_similarity chain_matmul pinverse linalg_tensorsolve"
_COMPOSED = tuple(f"aten::{name}" for name in _MADE_OF_ROWS.split(" "))
"""Ops that are made of composite ops which tables list, such as tensordot."""
_WITH_PARAMETERS = (
    "layer_norm native_layer_norm group_norm native_group_norm rms_norm _fused_rms_norm batch_norm instance_norm",
    "native_batch_norm _batch_norm_impl_index _native_batch_norm_legit _batch_norm_with_update cudnn_batch_norm",
)
_NORMALIZATIONS = tuple(f"aten::{name}" for names in _WITH_PARAMETERS for name in names.split(" "))
"""Ops that take parameters in float32 beside an input in lower precision, which their rules for vmap and jvp don't."""
_FLOAT32_TANGENTS = facts("float32_tangents")
UNLISTED = (*_COMPOSED, *_NORMALIZATIONS, *sorted(_FLOAT32_TANGENTS))
"""Ops that tables need not list."""


def _in_one_dtype(op: OpOverload, run: Kernel) -> Kernel:
    """Return what runs a normalization of mixed dtypes in float32; its result has the input's dtype.

    Its kernels compute in float32 inside, and round the result once, as this does.
    """
    written = [i for i, a in enumerate(op._schema.arguments) if a.name in WRITTEN]

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        dtypes = {t.dtype for t in tensors}
        is_lost = any(i < len(args) and args[i] is not None and args[i].dtype is not torch.float32 for i in written)
        if len(dtypes) < 2 or not dtypes <= CASTABLE or is_lost:
            return run(*args, **kwargs)
        result = run(*(a.to(torch.float32) if isinstance(a, torch.Tensor) else a for a in args), **kwargs)
        if isinstance(result, torch.Tensor):
            return result.to(tensors[0].dtype)
        return (result[0].to(tensors[0].dtype), *result[1:])

    return call


def _with_even_tangents(run: Kernel) -> Kernel:
    """Return what runs an op such that each result's tangent, which may come in float32, has the result's dtype."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        if forward_ad_level() < 0:
            return result
        return tree_map_only(torch.Tensor, lambda t: even(t, t.dtype) if t.is_floating_point() else t, result)

    return call


class _Entrance:
    """One op's kernel, and the devices whose tables list the op."""

    def __init__(self, op: OpOverload) -> None:
        self.op = op
        self.below: Kernel = get_kernel(op, _KEY.name).call_boxed
        self.devices: dict[str, DeviceState] = {}
        self.kernels: dict[str, Kernel] = {}

    @functools.cached_property
    def slots(self) -> frozenset[int]:
        """Where the op may be given a number for a tensor."""
        return number_slots(self.op)

    def kernel(self) -> Kernel:
        """Return what is registered; the kernels of devices are built when they are first called."""

        def run(keys: Any, /, *args: Any, **kwargs: Any) -> Any:
            for device in self.devices.values():
                if not _is_excluded(device.key) and _any_tensor(_check(device.backend), (args, kwargs.values())):
                    kernel = self.kernels.get(device.type) or self.kernels.setdefault(device.type, self._build(device))
                    return kernel(keys, *args, **kwargs)
            return self.run_below(keys, *args, **kwargs)

        return left_out_by_itself(run)

    def run_below(self, keys: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Hand the op on to the transforms.

        A level gives a wrapped number no memory, which a kernel in Python can't be given on the levels below or in
        the backward pass: hand on a tensor that isn't wrapped.
        """
        return self.below(keys, *(as_tensors(args, self.slots) if self.slots else args), **kwargs)

    def is_composed(self) -> bool:
        """Tell whether the transforms have no rule for the op and go by what it is made of."""
        has_kernel = functools.partial(dispatch_has_kernel_for_dispatch_key, self.op.name())
        return has_kernel("CompositeImplicitAutograd") and not has_kernel("FuncTorchBatched")

    def take_apart(self, keys: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run what the op is made of from here, so that the rows among that are seen."""
        return self.op._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)

    def _build(self, device: DeviceState) -> Kernel:
        run = self.take_apart if self.is_composed() else self.run_below

        def absent(scope: Any, keys: Any, /, *args: Any, **kwargs: Any) -> Any:
            return self._served(functools.partial(run, keys))(*args, **kwargs)

        call = self._served(functools.partial(self.run_below, _KEYS))
        return build(device, self.op, outside=self.run_below, absent=absent, call=call)

    def _served(self, run: Kernel) -> Kernel:
        name = overload_name(self.op)
        if name in _FLOAT32_TANGENTS:
            return _with_even_tangents(run)
        return _in_one_dtype(self.op, run) if name in _NORMALIZATIONS else run


@functools.cache
def _check(backend: Backend) -> Callable[[Any], bool]:
    return backend.tensor_check()


def _any_tensor(check: Callable[[Any], bool], values: Iterable[Any]) -> bool:
    for value in values:
        if isinstance(value, torch.Tensor):
            if check(value):
                return True
        elif not isinstance(value, str) and isinstance(value, Iterable) and _any_tensor(check, value):
            return True
    return False


def install(device: DeviceState, ops: Iterable[str], *, apart: bool = False) -> None:
    """Install kernels for ops of a device's table; torch before 2.9 gives no hold of what they go on top of.

    Those that are installed ``apart`` can be withdrawn one by one.
    """
    if get_kernel is None:
        return
    for name in ops:
        if name not in _installed:
            op = find_overload(name)
            if op is None:
                continue
            entrance = _installed[name] = _Entrance(op)
            group = "aten" if op.namespace == "aten" and not apart else name
            if group not in _libraries:
                _libraries[group] = torch.library.Library(op.namespace, "IMPL")
            put_on_top(_libraries[group], name.partition("::")[2], _KEY.name, entrance.kernel())
        _installed[name].devices[device.type] = device


def make_anew(op: str) -> None:
    """Make an op's kernel anew, for its schema may be another one."""
    entrance = _installed.pop(op, None)
    if entrance is not None:
        _libraries.pop(op)._destroy()
        for device in entrance.devices.values():
            install(device, [op])


def withdraw_apart(device: DeviceState, ops: Iterable[str]) -> None:
    """Take out a device's kernels of ops that were installed apart."""
    for name in ops:
        entrance = _installed.get(name)
        if entrance is not None and name in _libraries:
            entrance.devices.pop(device.type, None)
            entrance.kernels.pop(device.type, None)
            if not entrance.devices:
                del _installed[name]
                _libraries.pop(name)._destroy()


def withdraw_idle() -> None:
    """Take out kernels that were installed apart and that no device needs any more."""
    for name in [name for name, entrance in _installed.items() if not entrance.devices and name in _libraries]:
        del _installed[name]
        _libraries.pop(name)._destroy()


def withdraw(device: DeviceState) -> None:
    """Take a device's kernels out again."""
    for entrance in _installed.values():
        entrance.devices.pop(device.type, None)
        entrance.kernels.pop(device.type, None)
    if not any(entrance.devices for entrance in _installed.values()):
        _installed.clear()
        for library in _libraries.values():
            library._destroy()
        _libraries.clear()
