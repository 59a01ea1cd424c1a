"""Where a call came from: the module whose ``forward`` is running, by name, and what a tensor is called there.

The modules are found on Python's own stack. Hooks on modules would be seen by torch's compiler, which would
compile anew while somebody looks.
"""

from __future__ import annotations

import sys
from types import FrameType
from weakref import WeakKeyDictionary

import torch
import torch.fx.traceback as fx_traceback

__all__ = ["Places"]

Module = torch.nn.Module
_CALL = Module._call_impl.__code__


class Places:
    """The names of the modules met so far.

    The names are those of ``named_modules`` in the outermost module; that one has its class's name. Those in
    another outermost module come after its class's name and a colon.
    """

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[Module, str] = WeakKeyDictionary()
        self._has_root = False

    def add(self, root: Module) -> None:
        """Name a module and all in it, but for those that have names."""
        kind = type(root).__name__
        prefix = f"{kind}:" if self._has_root else ""
        self._has_root = True
        for name, module in root.named_modules():
            self._names.setdefault(module, f"{prefix}{name}" if name else kind)

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
        """Return the name of a tensor that is an attribute of the module, or a view of one; None if it is none."""
        if module is None:
            return None
        for place in (module._parameters, module._buffers, module.__dict__):
            for name, value in place.items():
                if value is tensor or (isinstance(value, torch.Tensor) and value is tensor._base):
                    return f"{self._names.get(module, '')}.{name}"
        return None


def compiled_place() -> str:
    """Return the name of the module whose part of a program is being traced, as the compiler says it."""
    stack = fx_traceback.current_meta.get("nn_module_stack") or {}
    names = [str(path) for path, _ in stack.values()]
    return names[-1].removeprefix("L['self'].").removeprefix("_modules.") if names else ""


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
