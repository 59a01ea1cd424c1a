"""Dispatch keys by name: those of Autocast have no members in torch's Python enum, but for a few."""

from __future__ import annotations

from ..errors import OpTableError
from ..torch_internals import DispatchKey, dispatch_key_name

__all__ = ["autocast_key"]


def autocast_key(name: str) -> DispatchKey:
    """Return the dispatch key of that name.

    Raises:
        OpTableError: torch has none.

    Example:
        >>> import torch
        >>> torch._C._dispatch_key_name(autocast_key("AutocastXPU"))
        'AutocastXPU'
    """
    for number in range(64):
        key = DispatchKey(number)
        if dispatch_key_name(key) == name:
            return key
    raise OpTableError(f"torch has no dispatch key {name!r}.")
