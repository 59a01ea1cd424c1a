"""Putting mpamp under torch's names, and taking it away again."""

from __future__ import annotations

from types import TracebackType

from .. import children
from ..locks import Rank, made
from .compilers import COMPILERS
from .flags import FLAGS
from .functions import FUNCTIONS
from .regions import REGIONS
from .scalers import SCALERS

__all__ = ["Installation", "install", "uninstall"]

_PARTS = (REGIONS, SCALERS, FUNCTIONS, FLAGS, COMPILERS)
_CHILDREN = "mpamp.standins:install"
_lock = made(Rank.INSTALLING)
_all: list[Installation] = []
"""Those in force, in order; the last one's options hold."""


class Installation:
    """What one call of ``install`` did; leaving it as a context manager takes it back."""

    def __init__(self, persistent_cache: bool) -> None:
        self.persistent_cache = persistent_cache

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _lock:
            if self in _all:
                _all.remove(self)
                _settle()


def install(*, persistent_cache: bool = False) -> Installation:
    """Have torch's names for mixed precision be mpamp's, in the whole process and in Python processes that it starts.

    ``torch.autocast`` and ``torch.amp.autocast``, their forms for one device, ``torch.amp.GradScaler`` and its forms,
    ``custom_fwd`` and ``custom_bwd``: each keeps its arguments, attributes, class and warnings, and serves by mpamp's
    op tables, cast cache and scaler; whoever imported it before has it too. Nothing else is to be changed in a script
    or a framework. A child process is reached by its environment: docs/install.md says which are not.

    It may be called again, in other threads too: torch's names are its own again when every ``with`` block is left,
    or after ``uninstall``.

    Args:
        persistent_cache: Keep casts of weights from region to region until the weight changes, as regions of
            ``mpamp.autocast`` do that are made with it. The latest call's holds.

    Returns:
        A context manager that takes this call back when it is left.

    Example:
        >>> import torch, mpamp
        >>> with install():
        ...     scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        >>> isinstance(scaler, mpamp.GradScaler), scaler.history
        (True, [])
    """
    installation = Installation(persistent_cache)
    with _lock:
        _all.append(installation)
        try:
            _settle()
        except BaseException:
            _all.remove(installation)
            _settle()
            raise
    return installation


def uninstall() -> None:
    """Have torch's names be its own again, however often ``install`` was called; again does nothing.

    Regions that are open, in other threads too, stay as they are until they are left.

    Example:
        >>> import torch
        >>> before = torch.autocast.__enter__
        >>> _ = install()
        >>> uninstall()
        >>> torch.autocast.__enter__ is before
        True
    """
    with _lock:
        _all.clear()
        _settle()


def _settle() -> None:
    """Have what is replaced be what the installations in force ask for."""
    if _all:
        REGIONS.persistent_cache = _all[-1].persistent_cache
        for part in _PARTS:
            part.install()
        children.announce(_CHILDREN, persistent_cache=REGIONS.persistent_cache)
    else:
        for part in reversed(_PARTS):
            part.uninstall()
        children.withdraw(_CHILDREN)
