"""``torch.autocast`` in what Dynamo compiles: the same regions of torch's own that one of mpamp's is written as."""

from __future__ import annotations

from typing import Any

import torch

from ..importing import after_import
from ..patching import Patches
from ..regions.dynamo import Entered
from ..regions.region import traced_contexts
from ..torch_internals import CTX_MANAGER, autocast_variable, constant_variable, reset_dynamo
from .callers import is_torchs
from .regions import region_of

__all__ = ["COMPILERS"]


class _Compilers:
    """What is replaced in Dynamo's own region, once Dynamo is imported, and the way back."""

    def __init__(self) -> None:
        self._is_on = False
        self._patches = Patches()

    def install(self) -> None:
        if not self._is_on:
            self._is_on = True
            after_import(CTX_MANAGER, self._patch)
            reset_dynamo()

    def uninstall(self) -> None:
        if not self._is_on:
            return
        self._is_on = False
        self._patches.undo()
        reset_dynamo()

    def _patch(self) -> None:
        if self._is_on and not self._patches:
            variable = autocast_variable()
            self._patches.wrap(variable, "enter", _enter)
            self._patches.wrap(variable, "exit", _exit)


def _enter(enter: Any) -> Any:
    def enter_ours(self: Any, tx: Any, *args: Any) -> Any:
        contexts = _contexts(self, tx)
        if contexts is None:
            return enter(self, tx, *args)
        # Several, for an object may be entered again while it is open.
        self.__dict__.setdefault("mpamp_entered", []).append(Entered(tx, contexts))
        return constant_variable(None)

    return enter_ours


def _exit(exit: Any) -> Any:
    def exit_ours(self: Any, tx: Any, *args: Any) -> Any:
        entered = self.__dict__.get("mpamp_entered")
        if not entered:
            return exit(self, tx, *args)
        entered.pop().leave(tx)
        return constant_variable(None)

    return exit_ours


def _contexts(variable: Any, tx: Any) -> Any:
    """Return the regions that stand for a region of a user's; None where torch's own code enters it."""
    if is_torchs(str(tx.f_globals.get("__name__", "")), tx.f_code.co_name):
        return None
    made = torch.amp.autocast_mode.autocast(*variable.target_values)  # Dynamo has its arguments alone
    if region_of(made, persistent_cache=False) is None:
        return None
    return traced_contexts(made.device, made.fast_dtype, made._enabled, None)


COMPILERS = _Compilers()
