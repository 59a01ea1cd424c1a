"""``custom_fwd`` and ``custom_bwd`` with torch's arguments and mpamp's state, by every name that torch's have."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..functions import custom
from ..patching import Patches, own_value

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
        self._patches = Patches()

    def install(self) -> None:
        if not self._patches:
            for function in (custom_fwd, custom_bwd):
                for module in _having(function.__name__, _torchs(function)):
                    self._patches.put(module, function.__name__, function)

    def uninstall(self) -> None:
        if self._patches:
            self._patches.undo()
            for function in (custom_fwd, custom_bwd):
                for module in _having(function.__name__, function):  # they have imported it meanwhile
                    setattr(module, function.__name__, _torchs(function))


def _torchs(function: Any) -> Any:
    return own_value(torch.amp.autocast_mode, function.__name__)


def _having(name: str, function: Any) -> list[Any]:
    """Return the modules that have a function under its name: others may have imported it by then."""
    modules = [module for module in list(sys.modules.values()) if name in getattr(module, "__dict__", ())]
    return [m for m in modules if own_value(m, name) is function and m.__name__ != __name__]


FUNCTIONS = _Functions()
