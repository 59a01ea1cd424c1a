"""Losses in float32 that read lower-precision arguments as they are, where a copy in float32 would cost the most.

An engine asks ``fused`` for an op's function when it makes the op's kernel, and calls it before it casts.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from . import cross_entropy

if TYPE_CHECKING:
    from ...plugins.backend import Backend

__all__ = ["fused", "is_on"]

_FUSED = {"aten::cross_entropy_loss": cross_entropy.cross_entropy}


@functools.cache
def is_on() -> bool:
    """Tell whether losses may be fused; ``MPAMP_FUSED_LOSS=0`` in the environment says no. It is read once."""
    return os.environ.get("MPAMP_FUSED_LOSS") != "0"


def fused(op: str, backend: Backend) -> Callable[..., torch.Tensor | None] | None:
    """Return what may run an op whose policy is ``fp32`` with its arguments as they are, or None.

    It takes the op's arguments, all of them by position, with the Autocast key excluded, and returns the op's
    result, or None for a call that has to go by a cast.

    Example:
        >>> from mpamp.plugins.backend import Backend
        >>> class Npu(Backend):
        ...     device_type = "npu"
        >>> fused("aten::cross_entropy_loss", Npu()) is None  # it doesn't say that it has Triton
        True
    """
    function: Any = _FUSED.get(op)
    if function is None or not backend.has_triton or not is_on():
        return None
    return functools.partial(function, backend)
