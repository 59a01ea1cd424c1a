"""Putting models and optimizers back as they were where ``initialize`` fails, at whichever line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .classes import set_class
from .holding import attributes, containers, with_wrapped
from .masters import forget, keep, master_of

__all__ = ["Undo"]

_MODULE_DICTS = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict)]


class Undo:
    """A block that, if it ends with an exception, leaves everything that it was told to remember as it was then.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> try:
        ...     with Undo() as undo:
        ...         undo.remember([model], [])
        ...         model.half().extra = 1
        ...         raise KeyError
        ... except KeyError:
        ...     model.weight.dtype, hasattr(model, "extra")
        (torch.float32, False)
    """

    def __init__(self) -> None:
        self._actions: list[Callable[[], None]] = []

    def __enter__(self) -> Undo:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            for action in reversed(self._actions):
                action()

    def also(self, action: Callable[[], None]) -> None:
        """Have ``action`` called too, before what was remembered earlier is put back."""
        self._actions.append(action)

    def remember(self, models: Iterable[nn.Module], optimizers: Iterable[Any]) -> None:
        """Remember models and optimizers: classes, attributes, hooks, groups, state, tensors, gradients, masters."""
        tensors: dict[int, Tensor] = {}
        for module in (module for model in models for module in model.modules()):
            own = [*module._parameters.values(), *module._buffers.values()]
            tensors.update((id(tensor), tensor) for tensor in own if tensor is not None)
            self._remember_object(module, [vars(module)[name] for name in _MODULE_DICTS if name in vars(module)])
        for optimizer in (each for given in optimizers for each in with_wrapped(given)):
            tensors.update((id(p), p) for group in optimizer.param_groups for p in group["params"])
            self._remember_object(optimizer, containers(optimizer))
        for tensor in tensors.values():
            if not is_lazy(tensor):
                self._remember_tensor(tensor)

    def _remember_object(self, value: Any, inside: Iterable[Any]) -> None:
        cls, before = type(value), attributes(value)
        self._actions.append(lambda: _put_back_attributes(value, before))
        for container in inside:
            self._remember_container(container)
        self._actions.append(lambda: _put_back_class(value, cls))

    def _remember_container(self, container: Any) -> None:
        is_mapping = hasattr(container, "items")
        before = list(container.items()) if is_mapping else list(container)

        def put_back() -> None:
            now = list(container.items()) if is_mapping else list(container)
            if len(now) != len(before) or not all(_is_same(a, b) for a, b in zip(now, before, strict=True)):
                container.clear()
                for item in before:
                    if is_mapping:
                        container[item[0]] = item[1]
                    else:
                        (container.append if isinstance(container, list) else container.add)(item)

        self._actions.append(put_back)

    def _remember_tensor(self, tensor: Tensor) -> None:
        data, grad, master = tensor.data, tensor.grad if tensor.is_leaf else None, master_of(tensor)
        owners = 0 if master is None else master.owners

        def put_back() -> None:
            if tensor.dtype is not data.dtype or tensor.data_ptr() != data.data_ptr():
                tensor.grad = None
                tensor.data = data
            if tensor.is_leaf and tensor.grad is not grad:
                tensor.grad = grad
            if master is None:
                forget(tensor)
            else:
                master.owners = owners
                keep(tensor, master)

        self._actions.append(put_back)


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, tuple) and len(a) == 2 and a[0] is b[0] and a[1] is b[1])


def _put_back_class(value: Any, cls: type) -> None:
    if type(value) is not cls:
        set_class(value, cls)


def _put_back_attributes(value: Any, before: dict[str, Any]) -> None:
    now = attributes(value)
    for name in now.keys() - before.keys():
        object.__delattr__(value, name)
    for name, attribute in before.items():
        if now.get(name, _put_back_attributes) is not attribute:
            object.__setattr__(value, name, attribute)
