"""Which module a thread is in, and what a model's tensors are called."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

__all__ = ["ModulePaths", "unwarned_of_hooks"]

_OF_HOOKS = "Using `torch.compile\\(module\\)` when there are global hooks"


class _Stack(threading.local):
    def __init__(self) -> None:
        self.modules: list[torch.nn.Module] = []


class ModulePaths:
    """The names of a model's modules and tensors; while it is followed, the module that is running.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> paths = ModulePaths(model)
        >>> paths.tensor_name(model[0].bias)
        '0.bias'
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._names = {id(module): name for name, module in model.named_modules()}
        self._stack = _Stack()
        self.refresh()

    def refresh(self) -> None:
        """Look the model's tensors up anew: they may have been given other memory."""
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        self._tensors = {_storage(tensor): name for name, tensor in tensors}

    def here(self) -> str | None:
        """Return the name of the innermost module of the model that is running; None outside of it, "" in itself."""
        names = (self._names.get(id(module)) for module in reversed(self._stack.modules))
        return next((name for name in names if name is not None), None)

    def tensor_name(self, tensor: Tensor) -> str | None:
        """Return the name of the parameter or buffer whose memory a tensor has."""
        return self._tensors.get(_storage(tensor))

    def entered(self, module: torch.nn.Module) -> None:
        """Know that a module runs that was called before it was followed."""
        self._stack.modules.append(module)

    @contextlib.contextmanager
    def followed(
        self, begins: Callable[[], None] | None = None, ends: Callable[[Any], None] | None = None
    ) -> Iterator[None]:
        """Follow the modules that run; tell when the outermost call of the model begins, and its output at its end."""

        def enter(module: torch.nn.Module, _: Any) -> None:
            if torch.compiler.is_compiling():
                return  # a program holds what was traced, not who followed
            if begins is not None and module is self.model and self.model not in self._stack.modules:
                begins()
            self._stack.modules.append(module)

        def leave(module: torch.nn.Module, _: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            stack = self._stack.modules
            if module in stack:  # one that began before this did is not
                while stack.pop() is not module:
                    continue
            if ends is not None and module is self.model and self.model not in stack:
                ends(output)

        handles = (register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True))
        try:
            with unwarned_of_hooks():
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._stack.modules.clear()


@contextlib.contextmanager
def unwarned_of_hooks() -> Iterator[None]:
    """Have torch not warn of hooks on all modules: one is called for what ``torch.compile`` gives too, without harm."""
    warnings.filterwarnings("ignore", _OF_HOOKS)
    mine: Any = warnings.filters[0]
    try:
        yield
    finally:
        if mine in warnings.filters:  # else the script has made filters of its own
            warnings.filters.remove(mine)  # type: ignore[attr-defined]


def _storage(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None
