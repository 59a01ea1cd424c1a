"""Where mpamp asks torch something of its own, such as whether a kernel works: outside of the caller's program.

A process's first region may be entered anywhere: in a transform of ``torch.func``, under a dispatch mode, while a
program is traced, in inference mode. What is asked there is no part of the program, and no tensor of it is one of it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from .torch_internals import (
    DisableTorchFunction,
    DispatchKey,
    DispatchKeySet,
    ForceDispatchKeyGuard,
    disable_current_modes,
    dispatch_key_name,
    get_tracing_state,
    len_torch_dispatch_stack,
    set_tracing_state,
)

__all__ = ["outside", "probing"]


def _keys(*keys: DispatchKey) -> DispatchKeySet:
    return functools.reduce(lambda found, key: found | DispatchKeySet(key), keys[1:], DispatchKeySet(keys[0]))


_INCLUDED = _keys(DispatchKey.BackendSelect, DispatchKey.ADInplaceOrView)
_MODES = (DispatchKey.Python, DispatchKey.PythonTLSSnapshot)
_AUTOCAST = [k for k in map(DispatchKey, range(64)) if dispatch_key_name(k).startswith("Autocast")]
_EXCLUDED = _keys(*_MODES, *_AUTOCAST)
"""A thread's keys outside of every mode, transform and region."""


def outside() -> ForceDispatchKeyGuard:
    """Return a context in which the thread's keys are those outside of every mode, transform and region."""
    return ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED)


@contextmanager
def probing() -> Iterator[None]:
    """Be outside of every mode, transform, tracer and region, and record no graph.

    Example:
        >>> def f(x):
        ...     with probing():
        ...         assert torch._C._functorch.maybe_get_level(torch.ones(2)) == -1
        ...     return x.sum()
        >>> torch.func.grad(f)(torch.ones(2))
        tensor([1., 1.])
    """
    traced = get_tracing_state()
    modes = disable_current_modes() if len_torch_dispatch_stack() else nullcontext()
    # The guard is the outermost: it puts back the keys that the others change.
    with outside(), DisableTorchFunction(), torch.inference_mode(False), torch.no_grad(), modes:
        if traced is not None:
            set_tracing_state(None)
        try:
            yield
        finally:
            if traced is not None:
                set_tracing_state(traced)
