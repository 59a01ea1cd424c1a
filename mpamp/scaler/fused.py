"""Lends a fused optimizer what its kernel needs to unscale, and to skip without the host."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .gradients import local_part
from .kernels import moved

__all__ = ["is_fused", "lent"]


def is_fused(optimizer: Any) -> bool:
    """Tell whether an optimizer unscales and skips by itself, by what it is lent.

    A wrapper that only has the word from what it wraps doesn't: what it is lent stays with it.
    """
    name = "_step_supports_amp_scaling"
    return bool(getattr(optimizer, name, False)) and inspect.getattr_static(optimizer, name, None) is not None


@contextmanager
def lent(optimizer: Any, grad_scale: Tensor | None, found_inf: Tensor) -> Iterator[None]:
    """Set ``optimizer.grad_scale`` and ``optimizer.found_inf`` while the optimizer steps.

    They are taken away after an exception, too: the next step would multiply its scale by what was left.
    """
    is_first = not getattr(optimizer, "state", True)
    optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf
    if is_first:
        _clear_unset_momentum_(optimizer, found_inf)


def _clear_unset_momentum_(optimizer: Any, found_inf: Tensor) -> None:
    """Zero the momentum that torch's fused SGD allocates in its first step and, if it skips, never writes."""
    with torch.no_grad():
        for state in optimizer.state.values():
            momentum = state.get("momentum_buffer")
            if isinstance(momentum, Tensor):
                local_part(momentum).masked_fill_(moved(found_inf, momentum.device) > 0, 0)
