"""``custom_fwd`` and ``custom_bwd`` with torch's arguments and mpamp's state, by every name that torch's have."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..functions import custom

__all__ = ["FUNCTIONS"]


def custom_fwd(fwd: Any = None, *, device_type: str, cast_inputs: torch.dtype | None = None) -> Any:
    """Decorate the ``forward`` of an autograd Function: mpamp's ``custom_fwd`` under torch's name."""
    _check(device_type)
    return custom.custom_fwd(fwd, device_type=device_type, cast_inputs=cast_inputs)


def custom_bwd(bwd: Any = None, *, device_type: str) -> Any:
    """Decorate the ``backward`` of an autograd Function: mpamp's ``custom_bwd`` under torch's name."""
    _check(device_type)
    return custom.custom_bwd(bwd, device_type=device_type)


def _check(device_type: Any) -> None:
    if not isinstance(device_type, str):
        raise ValueError(f"Expected `device_type` of type `str`, got: `{type(device_type)}`")


class _Functions:
    """What stands where torch's functions stood."""

    def __init__(self) -> None:
        self._own: dict[str, Any] = {}

    def install(self) -> None:
        if not self._own:
            self._own = {f.__name__: getattr(torch.amp.autocast_mode, f.__name__) for f in (custom_fwd, custom_bwd)}
            for function in (custom_fwd, custom_bwd):
                _rebind(function.__name__, self._own[function.__name__], function)

    def uninstall(self) -> None:
        own, self._own = self._own, {}
        for function in (custom_fwd, custom_bwd):
            if own:
                _rebind(function.__name__, function, own[function.__name__])


def _rebind(name: str, before: Any, after: Any) -> None:
    """Replace a function wherever a module has it under its name: others may have imported it by then."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if names is not None and names.get(name) is before and module.__name__ != __name__:
            names[name] = after


FUNCTIONS = _Functions()
