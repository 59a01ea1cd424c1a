"""Whose code enters a region: regions that torch's own code and mpamp's enter stay torch's own.

A checkpoint's recompute, ``custom_bwd`` and compilers put back by them what was, and mpamp carries its state there
by itself; a region of ours there would have the device's default table in place of the forward's.
"""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ["is_torchs", "is_torchs_frame"]

_ROOTS = ("torch", "mpamp")
_DECORATED = ("torch.amp.autocast_mode", "decorate_autocast")
"""Where torch runs a user's function that a region decorates."""


def is_torchs(module: str, function: str) -> bool:
    """Tell whether a function is torch's or mpamp's own code, as far as regions go.

    Example:
        >>> is_torchs("torch.utils.checkpoint", "backward"), is_torchs("torchvision.ops", "forward")
        (True, False)
    """
    return module.partition(".")[0] in _ROOTS and (module, function) != _DECORATED


def is_torchs_frame(depth: int) -> bool:
    """Tell whether the code that enters a region is; ``depth`` is how far above the caller of this it starts."""
    frame: FrameType | None = sys._getframe(depth + 1)
    while frame is not None and (frame.f_code.co_name == "__enter__" or _name(frame) == "contextlib"):
        frame = frame.f_back
    return frame is not None and is_torchs(_name(frame), frame.f_code.co_name)


def _name(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
