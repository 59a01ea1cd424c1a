"""Being called when a module has been imported. Knows nothing of torch: child processes load this file by itself."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["after_import"]


def after_import(name: str, act: Callable[[], object]) -> None:
    """Call ``act`` when a module has been imported; at once if it has been.

    Example:
        >>> after_import("sys", lambda: print("it is there"))
        it is there
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        act()
        return
    finder = next((f for f in sys.meta_path if isinstance(f, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    finder.waiting.setdefault(name, []).append(act)


class _Finder(importlib.abc.MetaPathFinder):
    """Has the loaders of some modules say when they are through; the modules are found by the others."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[], object]]] = {}

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.waiting:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                self._watch(spec)
                return spec
        return None

    def _watch(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == spec.name:
                vars(loader).pop("exec_module", None)  # the loader stays what it was
                for act in self.waiting.pop(spec.name, []):
                    act()

        loader.exec_module = exec_module
