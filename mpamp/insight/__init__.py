"""See what autocast does: which op was cast, where, by which rule, and what of it is worth changing.

What does the work is loaded when it is first asked for: that makes ``import mpamp`` cheap.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .report.collecting import Reporting
    from .tracing import Trace

__all__ = ["explain", "reporting", "trace"]


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


def reporting(path: str | os.PathLike[str] | None, script: str = "", *, watch: int = 20) -> Reporting:
    """Return a context manager that looks at what runs inside, and writes a report of it as one HTML page.

    ``mpamp report script.py`` does so around a script. What is raised inside goes on, and the report says so.

    Args:
        path: Where to; None writes nothing, and ``report`` of what is returned has it as values.
        script: What the report says that ran.
        watch: How many steps of the model are looked at op by op for overflow and underflow: the first ones, and as
            many that follow a skipped one. They take some times longer than the others. 0 looks at none.

    Raises:
        MpampError: There is a path, and jinja2 isn't installed.

    Example:
        >>> import torch, mpamp
        >>> with reporting(None) as seen, mpamp.autocast("cpu", dtype=torch.bfloat16):
        ...     y = torch.nn.Linear(64, 64)(torch.ones(32, 64))
        >>> seen.report.outcome.how, seen.report.summary.total("casts")
        ('finished', 3)
    """
    from .report.collecting import Reporting

    return Reporting(path, script, watch)
