"""The models of a script that nobody names: the outermost modules, noticed when they are called."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from ..places import module_frame

__all__ = ["Roots"]

Module = torch.nn.Module
_OF_HOOKS = "Using `torch.compile\\(module\\)` when there are global hooks"
"""What torch warns of: that a hook is called for what ``torch.compile`` gives too, which does no harm here."""


class Roots:
    """The outermost modules called so far, and a listener that is told of each call of one, before it runs.

    Calls in code that is being compiled aren't noticed: a program holds what was traced, not who listened.
    """

    def __init__(self, begins: Callable[[Module], None]) -> None:
        self._begins = begins
        self._inner: WeakSet[Module] = WeakSet()
        self._labels: WeakKeyDictionary[Module, str] = WeakKeyDictionary()

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Notice calls of modules inside."""
        handle = register_module_forward_pre_hook(self._enter)
        warnings.filterwarnings("ignore", _OF_HOOKS)
        mine: Any = warnings.filters[0]
        try:
            yield
        finally:
            handle.remove()
            if mine in warnings.filters:  # else the script has made filters of its own
                warnings.filters.remove(mine)  # type: ignore[attr-defined]

    def _enter(self, module: Module, _: Any) -> None:
        if torch.compiler.is_compiling() or module in self._inner:
            return
        if module not in self._labels:
            if not _is_outermost():
                return
            self._labels[module] = type(module).__name__
            self._inner.update(m for m in module.modules() if m is not module)
        self._begins(module)

    def label(self, root: Module) -> str:
        """Return what a root is called: its class's name."""
        return self._labels.get(root, type(root).__name__)

    def parameters(self) -> dict[int, tuple[str, torch.nn.Parameter]]:
        """Return the parameters of all roots with their names, by identity; others' than the first root's say whose."""
        found: dict[int, tuple[str, torch.nn.Parameter]] = {}
        for number, (root, label) in enumerate(list(self._labels.items())):
            for name, param in root.named_parameters():
                found.setdefault(id(param), (f"{label}:{name}" if number else name, param))
        return found


def _is_outermost() -> bool:
    frame = module_frame(sys._getframe(2))
    return frame is None or module_frame(frame.f_back) is None
