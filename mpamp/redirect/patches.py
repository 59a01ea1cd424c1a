"""What is replaced in torch so that it passes for what it stands for, with ``torch.jit.script`` too."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from .. import patching
from ..torch_internals import get_builtin_table

__all__ = ["Patches", "wrapped"]


class Patches(patching.Patches):
    """Attributes that are replaced, by functions that look like those they stand for.

    Example:
        >>> import math
        >>> patches = Patches()
        >>> patches.wrap(math, "sqrt", lambda original: lambda value: original(abs(value)))
        >>> math.sqrt(-4.0), math.sqrt.__name__
        (2.0, 'sqrt')
        >>> patches.undo()
    """

    def __init__(self) -> None:
        super().__init__()
        self._scripted: list[Any] = []
        self._ops: dict[int, str] = get_builtin_table()  # made here, of functions that are torch's own

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a function by what ``make`` returns for it, if the owner has it: versions of torch differ."""
        if getattr(owner, name, None) is not None:
            super().wrap(owner, name, lambda original: self._made(owner, name, original, make))

    def _made(self, owner: Any, name: str, original: Any, make: Callable[[Any], Any]) -> Any:
        function = wrapped(original, make(original))
        if not isinstance(original, types.FunctionType):  # C functions don't always say where pickle finds them
            function.__module__, function.__qualname__ = owner.__name__, name
            vars(function).pop("__wrapped__", None)  # who asks for the source is not sent on to C
        self._script_as(original, function)
        return function

    def _script_as(self, original: Any, function: Any) -> None:
        """Have ``torch.jit.script`` take the new function for the op that the old one is."""
        op = self._ops.get(id(original))
        if op is not None:
            self._ops[id(function)] = op
            self._scripted.append(function)

    def undo(self) -> None:
        """Put everything back, last first."""
        super().undo()
        while self._scripted:
            self._ops.pop(id(self._scripted.pop()), None)


def wrapped(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Have a function look like the one that it stands for: name, module (for pickle), signature and text."""
    return functools.wraps(original)(function)
