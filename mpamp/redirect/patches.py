"""One table of what is replaced in torch, and its way back."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch.jit import _builtins

__all__ = ["Patches", "wrapped"]

_MISSING = object()


class Patches:
    """Attributes that were replaced, in order; ``undo`` leaves every owner as it was.

    Example:
        >>> import math
        >>> patches = Patches()
        >>> patches.put(math, "pi", 3)
        >>> patches.undo()
        >>> math.pi > 3
        True
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []
        self._scripted: list[Any] = []
        self._ops: dict[int, str] = _builtins._get_builtin_table()  # made here, of functions that are torch's own

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a module or a class; what it inherits is covered and not touched."""
        self._replaced.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace a function by what ``make`` returns for it, if the owner has it: versions of torch differ."""
        original = getattr(owner, name, None)
        if original is not None:
            function = wrapped(original, make(original))
            if not isinstance(original, types.FunctionType):  # C functions don't always say where pickle finds them
                function.__module__, function.__qualname__ = owner.__name__, name
                vars(function).pop("__wrapped__", None)  # who asks for the source is not sent on to C
            self.put(owner, name, function)
            self._script_as(original, function)

    def _script_as(self, original: Any, function: Any) -> None:
        """Have ``torch.jit.script`` take the new function for the op that the old one is."""
        op = self._ops.get(id(original))
        if op is not None:
            self._ops[id(function)] = op
            self._scripted.append(function)

    def undo(self) -> None:
        """Put everything back, last first."""
        while self._scripted:
            self._ops.pop(id(self._scripted.pop()), None)
        while self._replaced:
            owner, name, value = self._replaced.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def wrapped(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Have a function look like the one that it stands for: name, module (for pickle), signature and text."""
    return functools.wraps(original)(function)
