"""What the floors above want to be told of: they say so as they are loaded, and devices know nothing of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["LISTENERS", "Listeners"]


class Listeners:
    """Called in the order in which they were added."""

    def __init__(self) -> None:
        self.before_first_use: list[Callable[[], Any]] = []
        """Import what a device's first region needs: a fork during a later import would leave a module locked."""
        self.is_found: list[Callable[[Any], Any]] = []
        """A device's state was made, and nobody has it yet."""
        self.in_use: list[Callable[[str], Any]] = []
        """A device of that type is in use from now on; may take locks of torch's."""
        self.rules_changed: list[Callable[[], Any]] = []
        """Code that was compiled under the rules before must be compiled anew; may take locks of torch's."""


LISTENERS = Listeners()
