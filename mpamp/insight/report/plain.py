"""A script's other run: as it is, but in float32."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...engine.scope import THREAD
from ...patching import Patches
from ...regions.region import regions_off
from ...standins.callers import is_torchs_frame

__all__ = ["autocast_off", "torch_regions_counted"]


@contextlib.contextmanager
def autocast_off() -> Iterator[None]:
    """Have every region made inside do nothing: mpamp's and torch's. What is cast by hand stays cast.

    Example:
        >>> with autocast_off(), torch.autocast("cpu", dtype=torch.bfloat16):
        ...     print((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        torch.float32
    """
    patches = Patches()
    patches.wrap(torch.autocast, "__init__", _disabled)
    try:
        with regions_off():
            yield
    finally:
        patches.undo()


def _disabled(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
    ) -> None:
        original(self, device_type, dtype, False, cache_enabled)

    return __init__


@contextlib.contextmanager
def torch_regions_counted(count: list[int]) -> Iterator[None]:
    """Add up in ``count[0]`` the enabled regions of torch's own that are entered inside: a trace doesn't see them.

    Those are left out that ``mpamp.install`` makes mpamp's, and those by which torch and mpamp put back what there was.
    """
    patches = Patches()
    patches.wrap(torch.autocast, "__enter__", functools.partial(_counted, count))
    try:
        yield
    finally:
        patches.undo()


def _counted(count: list[int], original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    # Of this name, for mpamp.install looks for who enters a region above all that is called so.
    @functools.wraps(original)
    def __enter__(self: Any) -> Any:
        entries = THREAD.state.entries
        before = len(entries)
        result = original(self)
        is_ours = len(entries) > before or is_torchs_frame(1)
        count[0] += bool(self._enabled) and not is_ours
        return result

    return __enter__
