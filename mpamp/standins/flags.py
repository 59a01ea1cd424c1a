"""``torch.is_autocast_cache_enabled`` says in a region what it was made with, to whoever isn't torch.

Regions of mpamp keep casts in a cache of their own and have torch's switched off. torch's own code, which asks in order
to put the flag back later, is told so; users and frameworks, who ask whether casts are kept, are told what they asked
for. Setting the flag changes nothing while it is on by that answer: whoever switches it on again has done so before.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from ..engine.scope import THREAD
from ..patching import Patches
from ..regions.region import Region
from .callers import is_torchs

__all__ = ["FLAGS"]


class _Flags:
    """What stands where torch's functions stood."""

    def __init__(self) -> None:
        self._patches = Patches()

    def install(self) -> None:
        if not self._patches:
            self._patches.wrap(torch, "is_autocast_cache_enabled", _get)
            self._patches.wrap(torch, "set_autocast_cache_enabled", _put)

    def uninstall(self) -> None:
        self._patches.undo()


def _get(own: Any) -> Any:
    @functools.wraps(own)
    def is_autocast_cache_enabled() -> bool:
        return bool(own()) or (_keeps_casts() and not _is_asked_by_torch())

    is_autocast_cache_enabled._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return is_autocast_cache_enabled


def _put(own: Any) -> Any:
    @functools.wraps(own)
    def set_autocast_cache_enabled(enabled: bool) -> None:
        if not (enabled and _keeps_casts() and not _is_asked_by_torch()):
            own(enabled)

    return set_autocast_cache_enabled


def _keeps_casts() -> bool:
    """Tell whether the calling thread's innermost region of mpamp keeps casts of weights."""
    entries = THREAD.state.entries
    return bool(entries) and isinstance(entries[-1][0], Region) and entries[-1][0].keeps_casts


def _is_asked_by_torch() -> bool:
    frame = sys._getframe(2)
    return is_torchs(str(frame.f_globals.get("__name__", "")), frame.f_code.co_name)


FLAGS = _Flags()
