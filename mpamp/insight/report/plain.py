"""A script's other run: as it is, but in float32."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ...engine.scope import THREAD
from ...regions.region import regions_off

__all__ = ["autocast_off", "torch_regions_counted"]


@contextlib.contextmanager
def autocast_off() -> Iterator[None]:
    """Have every region made inside do nothing: mpamp's and torch's. What is cast by hand stays cast.

    Example:
        >>> with autocast_off(), torch.autocast("cpu", dtype=torch.bfloat16):
        ...     print((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        torch.float32
    """
    original = torch.autocast.__init__

    @functools.wraps(original)
    def disabled(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
    ) -> None:
        original(self, device_type, dtype, False, cache_enabled)

    torch.autocast.__init__ = disabled  # type: ignore[method-assign]
    try:
        with regions_off():
            yield
    finally:
        torch.autocast.__init__ = original  # type: ignore[method-assign]


@contextlib.contextmanager
def torch_regions_counted(count: list[int]) -> Iterator[None]:
    """Add up in ``count[0]`` the enabled regions of torch's own that are entered inside: a trace doesn't see them.

    Those are left out that ``mpamp.install`` makes mpamp's, and those by which torch and mpamp put back what there was.
    """
    original: Any = torch.autocast.__enter__

    # Of this name, for mpamp.install looks for who enters a region above all that is called so.
    @functools.wraps(original)
    def __enter__(self: Any) -> Any:
        entries = THREAD.state.entries
        before = len(entries)
        result = original(self)
        name = str(sys._getframe(1).f_globals.get("__name__"))
        is_ours = len(entries) > before or name.startswith(("mpamp.", "torch.utils."))
        count[0] += bool(self._enabled) and not is_ours
        return result

    torch.autocast.__enter__ = __enter__  # type: ignore[method-assign]
    try:
        yield
    finally:
        if torch.autocast.__enter__ is __enter__:
            torch.autocast.__enter__ = original  # type: ignore[method-assign]
