"""``torch.autocast`` as it is, class, arguments and attributes, with regions of mpamp's when it is entered.

The class stays torch's own, so that whoever has it by whatever name, or has derived from it, has ours.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch

from ..devices.registry import device_state
from ..engine.compiling import is_dynamo_compiling, left_out_by_itself
from ..engine.entries import enter, leave
from ..engine.marks import set_dtype
from ..errors import MpampError
from ..locks import LOCK
from ..patching import Patches
from ..regions.decorating import decorate
from ..regions.region import Region, autocast
from ..torch_internals import TorchDispatchModeKey, UnmanagedAutocast
from .callers import is_torchs_frame

__all__ = ["REGIONS", "region_of"]

_AUTOCAST: Any = torch.amp.autocast_mode.autocast
_FAKE = TorchDispatchModeKey.FAKE


class _Entered(threading.local):
    """What the calling thread has entered: each object, its region, and whether a dtype was changed beside it."""

    def __init__(self) -> None:
        self.all: list[tuple[Any, Region, bool]] = []


class _Regions:
    """What is replaced in ``torch.autocast``, and the way back."""

    def __init__(self) -> None:
        self.persistent_cache = False
        self.entered = _Entered()
        self.open: dict[int, tuple[Any, Region, bool]] = {}
        """What all threads have entered."""
        self._patches, self._exit = Patches(), Patches()

    def install(self) -> None:
        with LOCK:
            if not self._patches:
                self._put_exit()
                self._patches.wrap(_AUTOCAST, "__enter__", _enter)
                self._patches.wrap(_AUTOCAST, "__call__", _call)

    def uninstall(self) -> None:
        with LOCK:
            self._patches.undo()
            self._put_exit_back()

    def begin(self, entry: tuple[Any, Region, bool]) -> None:
        """Note what a thread enters; it may have come here just before an uninstall."""
        with LOCK:
            self.open[id(entry)] = entry
            self._put_exit()

    def end(self, entry: tuple[Any, Region, bool]) -> None:
        with LOCK:
            del self.open[id(entry)]
            self._put_exit_back()

    def _put_exit(self) -> None:
        if not self._exit:
            self._exit.wrap(_AUTOCAST, "__exit__", _exit)

    def _put_exit_back(self) -> None:
        """Put torch's ``__exit__`` back unless a thread is in a region that only ours can end."""
        if not self._patches and not self.open:
            self._exit.undo()


REGIONS = _Regions()


def _enter(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @left_out_by_itself  # in the eager parts of a compiled program Dynamo would compile it, as any function of a user's
    @functools.wraps(own)
    def __enter__(instance: Any) -> Any:
        # Dynamo comes by for subclasses only, whose regions stay torch's in what it compiles.
        if is_dynamo_compiling() or type(instance) is UnmanagedAutocast or is_torchs_frame(1):
            return own(instance)
        region = region_of(instance, REGIONS.persistent_cache)
        if region is None:
            return own(instance)
        changes_dtype = not instance._enabled and instance.fast_dtype is not torch.get_autocast_dtype(instance.device)
        entry = (instance, region, changes_dtype)
        REGIONS.begin(entry)
        try:
            region.__enter__()
        except BaseException:
            REGIONS.end(entry)
            raise
        REGIONS.entered.all.append(entry)
        if changes_dtype:
            enter(entry, [(set_dtype, instance.device, instance.fast_dtype)])
        return instance

    return __enter__


def _exit(own: Callable[..., Any]) -> Callable[..., Any]:
    @left_out_by_itself
    @functools.wraps(own)
    def __exit__(instance: Any, *error: Any) -> Any:
        if is_dynamo_compiling():
            return own(instance, *error)
        entered = REGIONS.entered.all
        at = next((i for i in range(len(entered) - 1, -1, -1) if entered[i][0] is instance), None)
        if at is None:
            return own(instance, *error)
        entry = entered.pop(at)
        _, region, changes_dtype = entry
        if changes_dtype:
            leave(entry)
        region.__exit__(*error)
        REGIONS.end(entry)
        return False

    return __exit__


_present: set[str] = set()


def region_of(instance: Any, persistent_cache: bool) -> Region | None:
    """Return the region that an object of ``torch.autocast`` stands for; None where torch's own is to be entered.

    That is where no backend serves its device, or not in its dtype, and where torch goes on without a device.
    """
    try:
        if instance.device not in _present:
            if not device_state(instance.device).backend.is_available():
                return None
            _present.add(instance.device)
        return autocast(
            instance.device,
            instance.fast_dtype,
            bool(instance._enabled),
            bool(instance._cache_enabled),
            persistent_cache=persistent_cache,
        )
    except MpampError:
        return None


def _call(own: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return torch's decorator, with functions whose body runs in steps in their region too."""

    @left_out_by_itself
    @functools.wraps(own)
    def __call__(instance: Any, func: Any) -> Any:
        steps = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if any(runs_in_steps(func) for runs_in_steps in steps):
            return decorate(func, lambda: instance)
        return own(instance, func)

    return __call__
