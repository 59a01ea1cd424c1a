"""Writes into weights that torch's version counters don't show; the cast cache is told of them here.

Fused optimizers raise no counter, whether an ``Optimizer`` calls them or someone else. And torch itself sets
counters back after a write that autograd is not to see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...rules.eligibility import find_overload, overload_name
from ...torch_internals import (
    DisableTorchFunction,
    DispatchKey,
    OpOverload,
    dispatch_get_all_op_names,
    dispatch_has_kernel_for_dispatch_key,
    dispatch_keyset_full_after,
    unsafe_preserve_version_counter,
)
from ..compiling import left_out, left_out_by_itself
from .cache import forget, outdate
from .collectives import watch_collectives
from .handouts import watch_handouts
from .remaking import remake

__all__ = ["watch_writes"]

_KEY = "ADInplaceOrView"
"""Where in-place ops raise version counters, in inference mode too."""


def watch_writes() -> None:
    """Have the casts of a weight dropped wherever it is written without notice; called once, at the first region."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(_after_optimizer_step)
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)  # kernels go with it
    for op in silent_ops():
        library.impl(overload_name(op).partition("::")[2], _telling(op), _KEY, with_keyset=True)
    _watch_counters_set_back()
    watch_handouts()
    watch_collectives()


@left_out
def _after_optimizer_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    with DisableTorchFunction():
        weights = _written_by(optimizer)
        outdate(weights)
        remake(weights)


def _written_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters that a step may have written past their counters.

    Optimizers of others may call kernels that torch doesn't know, for any of their parameters. Torch's own leave
    alone what has no gradient.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    if type(optimizer).step.__module__.startswith("torch.optim.") and not any(hooks):
        return [p for p in params if p.grad is not None]
    return params


_libraries: list[torch.library.Library] = []


def silent_ops() -> Iterator[OpOverload]:
    """Yield torch's fused optimizers that raise no version counter of what they write."""
    for name in dispatch_get_all_op_names():
        if name.startswith("aten::_fused_") and not dispatch_has_kernel_for_dispatch_key(name, _KEY):
            op = find_overload(name)
            if op is not None and _writes_a_list(op):
                yield op


def _writes_a_list(op: OpOverload) -> bool:
    written = op._schema.arguments[0].alias_info
    return written is not None and written.is_write and not op._schema.returns


def _telling(op: OpOverload) -> Callable[..., None]:
    below = dispatch_keyset_full_after(getattr(DispatchKey, _KEY))

    def kernel(keys: Any, weights: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        try:
            op.redispatch(keys & below, weights, *args, **kwargs)
        finally:
            outdate(weights)  # the optimizer that is stepping has them made anew, if one is

    return left_out_by_itself(kernel)


def _watch_counters_set_back() -> None:
    preserve: Any = unsafe_preserve_version_counter
    leave = preserve.__exit__

    def __exit__(self: Any, *error: Any) -> None:
        try:
            leave(self, *error)
        finally:
            forget(self.tensors, for_good=True)

    preserve.__exit__ = __exit__
