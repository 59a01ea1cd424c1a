"""``torch.amp.GradScaler`` as it is, class and arguments, with scalers of mpamp's when one is made.

An object is given another class as it is made: one derived from its own and from mpamp's, in this order, so that
what a subclass overrides holds and what it asks its base for is mpamp's.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..patching import Patches
from ..scaler import GradScaler
from ..scaler.config import PluginMadeMeta

__all__ = ["SCALERS"]

_SCALER: Any = torch.amp.GradScaler
_CPU: Any = torch.cpu.amp  # whose types leave its scaler out
_SHARDED = "torch.distributed.fsdp.sharded_grad_scaler"
_FORMS = (torch.amp.GradScaler, torch.cuda.amp.GradScaler, _CPU.GradScaler)


class _Named(GradScaler):
    """mpamp's scaler with the arguments and the default device of torch's."""

    _made_as: type = _SCALER

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _remade, (self._made_as,), self.__getstate__()


_joined: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


def _join(cls: type) -> type:
    """Return the class that a scaler has that was made as one of ``cls``."""
    found = _joined.get(cls)
    if found is None:
        names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
        names["_is_sharded"] = any(base.__module__ == _SHARDED for base in cls.__mro__)
        bases = (_Named,) if issubclass(_Named, cls) else (cls, _Named)
        found = _joined[cls] = PluginMadeMeta(cls.__name__, bases, {**names, "_made_as": cls})
    return found


def _remade(cls: type) -> Any:
    """Return a scaler without any state, for what was pickled or is copied."""
    joined: Any = _join(cls)
    return joined.__new__(joined)


class _Scalers:
    """What is replaced in ``torch.amp.GradScaler``, and the way back."""

    def __init__(self) -> None:
        self._patches = Patches()

    def install(self) -> None:
        if not self._patches:
            self._patches.wrap(_SCALER, "__init__", _init)

    def uninstall(self) -> None:
        self._patches.undo()


def _init(own: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(own)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        cls = type(self)
        if issubclass(cls, GradScaler):
            own(self, *args, **kwargs)
            return
        made = GradScaler._made_by_plugin(_arguments(self, args, kwargs), {}) if cls in _FORMS else None
        if made is None:
            self.__class__ = _join(cls)
            _Named.__init__(self, *args, **kwargs)
        else:  # Python has the object that was to be made already: it becomes the plugin's
            self.__class__, self.__dict__ = type(made), made.__dict__

    return __init__


def _arguments(self: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return a call's arguments in order, with torch's defaults."""
    bound = inspect.signature(_Named.__init__).bind(self, *args, **kwargs)
    bound.apply_defaults()
    return bound.args[1:]


SCALERS = _Scalers()
