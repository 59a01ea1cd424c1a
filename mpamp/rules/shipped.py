"""What rules ask of the op lists that ship with mpamp: those lie a floor above, and are put here as they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["LISTS", "Lists"]


class Lists:
    """The shipped op lists."""

    families: Callable[[], Mapping[str, list[str]]]
    """Every family of ops by name."""
    refused: Callable[[], Mapping[str, str]]
    """Why no rule may name an op, by overload."""
    table: Callable[[str, str], Any]
    """The ``OpTable`` of a name, for a device type."""


LISTS = Lists()
