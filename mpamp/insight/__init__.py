"""See what autocast does: which op was cast, where, by which rule, and what of it is worth changing.

What does the work is loaded when it is first asked for: that makes ``import mpamp`` cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .tracing import Trace

__all__ = ["explain", "trace"]


def trace(history: int = 1000) -> Trace:
    """Return a trace, to be opened by ``with`` around regions, or training steps, or inside of a region.

    It sees the calls of ops in regions of mpamp, on every thread of the process, while it is open.

    Args:
        history: How many of the last calls to keep one by one; the rest is sums, whose number doesn't grow with them.

    Example:
        >>> import torch, mpamp
        >>> layer = torch.nn.Linear(64, 64)
        >>> with mpamp.trace() as seen, mpamp.autocast("cpu", dtype=torch.bfloat16):
        ...     y = layer(torch.ones(32, 64))
        >>> use = seen.uses[0]
        >>> use.op, use.policy, use.rule, use.casts
        ('aten::linear', 'lower_precision_fp', 'native', 3)
        >>> seen.findings
        ()
    """
    from .tracing import Trace

    return Trace(history)


def explain(model: torch.nn.Module, *inputs: Any, **kwargs: Any) -> Trace:
    """Run ``model(*inputs, **kwargs)`` once and return what autocast did.

    It runs in the region that is open here, or in a default one for the model's device. Buffers and random numbers
    are as they were afterwards.

    Example:
        >>> import torch, mpamp
        >>> with mpamp.autocast("cpu", dtype=torch.bfloat16):
        ...     seen = mpamp.explain(torch.nn.Linear(64, 64), torch.ones(32, 64))
        >>> seen.casts, seen.uses[0].dtypes_out
        (3, ('bfloat16',))
    """
    from . import tracing

    return tracing.explain(model, *inputs, **kwargs)
