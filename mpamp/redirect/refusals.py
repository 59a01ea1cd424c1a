"""What another device can't do for a script, and what a script is told that died for want of one."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ..errors import RedirectError
from .target import Target

__all__ = ["advice", "refused"]

INSTEAD = {
    "CUDAGraph": "Run the steps without recording them: leave the capture and the replay out",
    "graph": "Run the steps without recording them: leave the capture and the replay out",
    "graph_pool_handle": "Run the steps without recording them: leave the capture and the replay out",
    "ExternalStream": "Use torch.cuda.Stream()",
    "get_stream_from_external": "Use torch.cuda.Stream()",
    "caching_allocator_alloc": "Use torch.empty(size, dtype=torch.uint8)",
    "_record_memory_history": "Use torch.profiler.profile(profile_memory=True)",
    "split_group": "Use torch.distributed.new_group(ranks)",
    "replicate": "Call the module itself: one device has no replicas",
}
"""What to write instead, by the last part of the name."""
_WORDS = ("accelerator", "dummy base class", "nvidia driver", "no gpus")
"""What errors say that don't name the device: of a torch that is built without it, or for it and finds none."""


def refused(name: str, device: torch.device) -> Callable[..., NoReturn]:
    """Return what stands for a function that another device than a script's own can't serve."""

    remedy = INSTEAD.get(name.rpartition(".")[2], "Leave the call out there")

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RedirectError(
            f"{name} can't be sent to {str(device)!r}, where --device sends what is meant for another device. {remedy}."
        )

    return refuse


def advice(error: BaseException) -> str | None:
    """Return a line about ``--device`` for a script that died for want of a device; None if it died of another cause.

    Example:
        >>> advice(ValueError("no such file")) is None
        True
    """
    absent = Target(torch.device("cpu")).absent
    said = _said(error)
    backends = torch.distributed.Backend.default_device_backend_map if torch.distributed.is_available() else {}
    found = [name for name in absent if _has_word(said, name) or _has_word(said, str(backends.get(name)))]
    if not found and any(word in said for word in _WORDS):
        found = list(absent)
    if not found:
        return None
    return f"mpamp: there is no {found[0]} device on this machine; `mpamp run --device cpu` runs the script on the CPU."


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<![a-z]){re.escape(word)}(?![a-z])", text) is not None


def _said(error: BaseException) -> str:
    """Return, in lower case, what an error says, or else the line that it was raised at."""
    text = str(error)
    if not text and error.__traceback__ is not None:
        frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
        text = linecache.getline(frame.f_code.co_filename, line)
    return text.lower()
