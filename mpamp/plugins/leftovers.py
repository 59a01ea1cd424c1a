"""A plugin's code ends in the autocast state that it began in."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..errors import RegionError
from ..torch_internals import (
    DispatchKey,
    dispatch_key_name,
    dispatch_tls_is_dispatch_key_excluded,
    dispatch_tls_set_dispatch_key_excluded,
)

__all__ = ["no_region_left", "watch_regions"]

_open_regions: list[Callable[[], list[Any]]] = []


def watch_regions(opened: Callable[[], list[Any]]) -> None:
    """Take the calling thread's open regions, each in a list that begins with it, from ``opened``."""
    _open_regions[:] = [opened]


@functools.cache
def _autocast_keys() -> list[DispatchKey]:
    keys = [DispatchKey(number) for number in range(64)]
    return [key for key in keys if dispatch_key_name(key).startswith("Autocast")]


@contextlib.contextmanager
def no_region_left() -> Iterator[None]:
    """Put the calling thread's autocast back as it was.

    Raises:
        RegionError: What ran inside raised nothing, but left a region open.
    """
    is_excluded = dispatch_tls_is_dispatch_key_excluded
    entries = _open_regions[0]()
    depth, keys = len(entries), {key: is_excluded(key) for key in _autocast_keys()}
    cache = torch.is_autocast_cache_enabled()
    is_left = False
    try:
        yield
    finally:
        while len(entries) > depth:
            is_left = True
            entries[-1][0].__exit__(None, None, None)
        for key, was_excluded in keys.items():
            if is_excluded(key) is not was_excluded:
                is_left = True
                dispatch_tls_set_dispatch_key_excluded(key, was_excluded)
        torch.set_autocast_cache_enabled(cache)
    if is_left:
        raise RegionError("it left an autocast region open, or torch's autocast on.")
