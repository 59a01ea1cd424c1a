"""Where a call came from: the module whose ``forward`` is running, by name, and what a tensor is called there.

The modules are found on Python's own stack. Hooks on modules would be seen by torch's compiler, which would
compile anew while somebody looks.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.fx.traceback as fx_traceback

from ..engine.casts.cache import storage_of
from ..torch_internals import call_impl
from .origins import Facts

__all__ = ["Places"]

Module = torch.nn.Module
_LOCAL = re.compile(r"^L\['\w+'\]\.?")
"""What a compiler calls the variable that a model is in."""
_WRITTEN_OUT = re.compile(r"getattr\(([^()]*), '([^']*)'\)|([^()]*)\._modules\['([^']*)'\]")
"""How torch before 2.10 writes a module of a module."""
_CALL = call_impl.__code__


class Places:
    """The names of the modules met so far.

    The names are those of ``named_modules`` in the outermost module; that one has its class's name. Those in
    another outermost module come after its class's name and a colon.
    """

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[Module, str] = WeakKeyDictionary()
        self._tensors: Facts[tuple[str, bool]] = Facts()
        self._has_root = False

    def add(self, root: Module) -> None:
        """Name a module and all in it, but for those that have names."""
        kind = type(root).__name__
        prefix = f"{kind}:" if self._has_root else ""
        self._has_root = True
        for name, module in root.named_modules():
            path = self._names.setdefault(module, f"{prefix}{name}" if name else kind)
            for attribute, tensor in _tensors_of(module):
                if _has_memory_of_its_own(tensor) and self._tensors.get(tensor) is None:
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    self._tensors.put(tensor, (f"{path}.{attribute}", is_parameter))

    def here(self) -> tuple[str, Module | None]:
        """Return the name of the module that is running on the calling thread, and the module."""
        frame = module_frame(sys._getframe(1))
        if frame is None:
            return "", None
        module: Module = frame.f_locals["self"]
        name = self._names.get(module)
        if name is None:
            self.add(_outermost(frame))
            name = self._names.setdefault(module, f"({type(module).__name__})")
        return name, module

    def tensor(self, tensor: torch.Tensor, module: Module | None) -> str | None:
        """Return the name of a tensor that is an attribute of the module, or a view of one; None if it is none.

        One of another module that was named, or what has such a one's memory, has a name too.
        """
        for name, value in () if module is None else _attributes(module):
            if value is tensor or (value is tensor._base and value is not None):
                return f"{self._names.get(module, '')}.{name}"  # type: ignore[arg-type]
        found = self._tensors.get(tensor)
        return None if found is None else found[0]

    def is_parameters(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor has the memory of a parameter of a module that was named."""
        found = self._tensors.get(tensor)
        return found is not None and found[1]


def _attributes(module: Module) -> Iterator[tuple[str, Any]]:
    for place in (module._parameters, module._buffers, module.__dict__):
        yield from place.items()


def _tensors_of(module: Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that are a module's attributes, or are in lists and mappings that are."""
    for name, value in list(_attributes(module)):
        if isinstance(value, torch.Tensor):
            yield name, value
        elif not name.startswith("_") and isinstance(value, list | tuple | dict):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            yield from [(f"{name}[{key!r}]", item) for key, item in items if isinstance(item, torch.Tensor)]


def _has_memory_of_its_own(tensor: torch.Tensor) -> bool:
    storage = storage_of(tensor)
    return storage is not None and storage.nbytes() == tensor.numel() * tensor.element_size()


def compiled_place() -> str:
    """Return the name of the module whose part of a program is being traced, as the compiler says it."""
    stack = fx_traceback.current_meta.get("nn_module_stack") or {}
    names = [str(path) for path, _ in stack.values()]
    return _plain(names[-1]) if names else ""


def _plain(path: str) -> str:
    """Return a module's name from the path that the compiler has for it."""
    before = ""
    while path != before:
        before, path = path, _WRITTEN_OUT.sub(r"\1\3.\2\4", path)
    return _LOCAL.sub("", path).removeprefix("_modules.")


def module_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code is not _CALL:
        frame = frame.f_back
    return frame


def _outermost(frame: FrameType) -> Module:
    found = frame
    above = module_frame(frame.f_back)
    while above is not None:
        found, above = above, module_frame(above.f_back)
    module: Module = found.f_locals["self"]
    return module
