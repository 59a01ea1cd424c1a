"""Finds the ``setup_context`` that belongs to a decorated ``forward``, so that it can keep state for backward.

A forward of that style never sees the context, and a decorator in a class body never sees the class. The
Functions are found when forward is first called: their ``setup_context`` runs right after it, in the same state.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from ..engine.compiling import run_while_tracing
from ..torch_internals import FUNCTION_APPLY, are_functorch_transforms_active, restart_analysis

__all__ = ["SetupLink", "watch", "watch_while_tracing"]

_keys = itertools.count()
_links: weakref.WeakValueDictionary[int, SetupLink] = weakref.WeakValueDictionary()


class SetupLink:
    """Wraps the ``setup_context`` of each ``torch.autograd.Function`` whose ``forward`` is the linked one.

    Args:
        wrap: Called with a ``setup_context``, returns what takes its place in that Function.
    """

    def __init__(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.wrap = wrap
        self.forward: Callable[..., Any] | None = None
        self.key = next(_keys)
        """What ``watch`` knows the link by."""
        self.is_new = False
        """Whether the latest ``watch`` found a Function that it hadn't wrapped yet."""
        self._roots: list[type] = []
        _links[self.key] = self

    def bind(self, forward: Any) -> None:
        """Link the decorated forward, which keeps the link alive."""
        self.forward = forward
        forward._mpamp_link = self

    def watch(self) -> bool:
        """Wrap what isn't yet, subclasses included; tell whether any of the Functions has a ``setup_context``."""
        self.is_new = False
        if not self._roots:
            self._roots = [f for f in _subclasses(torch.autograd.Function) if self._is_of(f)]
        found = [f for root in self._roots for f in (root, *_subclasses(root)) if self._is_of(f)]
        return sum(self._wrap(function) for function in found) > 0

    def watch_one(self, function: Any) -> bool:
        """Do so for one Function, if it is one of the link's."""
        return self._is_of(function) and self._wrap(function)

    def _is_of(self, function: Any) -> bool:
        found: Any = function.forward
        while found is not None and found is not self.forward:
            found = getattr(found, "__wrapped__", None)
        return found is not None

    def _wrap(self, function: Any) -> bool:
        setup: Any = function.setup_context
        if setup is torch.autograd.Function.setup_context:
            return False
        if getattr(setup, "_mpamp_key", None) != self.key:
            wrapped: Any = self.wrap(setup)
            wrapped._mpamp_key = self.key
            function.setup_context = staticmethod(wrapped)
            self.is_new = True
        return True


def watch(key: int) -> bool:
    """Wrap the ``setup_context`` of the Function whose ``apply`` calls the forward of the link of that key.

    Tell whether there is one. It costs the same however many Functions there are, but where no frame knows which it is,
    and in functorch's transforms, which call the forward for Functions that they generate.
    """
    if FUNCTION_APPLY is None or are_functorch_transforms_active():
        return _links[key].watch()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not FUNCTION_APPLY:
        frame = frame.f_back
    return frame is not None and _links[key].watch_one(frame.f_locals["cls"])


@run_while_tracing
def watch_while_tracing(key: int) -> None:
    """Have the link of that key watch its Functions while Dynamo is tracing its forward."""
    _links[key].watch()
    if _links[key].is_new:  # Dynamo has read setup_context already
        raise restart_analysis("mpamp has found the setup_context of a decorated forward")


def _subclasses(cls: type) -> list[type]:
    found: list[type] = cls.__subclasses__()
    return found + [deeper for child in found for deeper in _subclasses(child)]
