"""Putting the drop-in where scripts look for it: ``apex`` and ``apex.amp`` among the imported modules."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

from .. import children
from .errors import DeprecatedFeatureWarning

__all__ = ["install", "uninstall"]

_SUBMODULES = {
    "apex.amp": "mpamp.apex.amp",
    "apex.amp.amp": "mpamp.apex.amp",
    "apex.amp.frontend": "mpamp.apex.initialize",
    "apex.amp.handle": "mpamp.apex.handle",
    "apex.amp.opt": "mpamp.apex.wrapper",
    "apex.amp.scaler": "mpamp.apex.scaler",
}
_ABSENT = object()
_CHILDREN = "mpamp.apex:install"
_replaced: dict[str, Any] = {}


def install() -> ModuleType:
    """Have ``from apex import amp`` give ``mpamp.apex.amp``, in child processes too; return ``apex.amp``.

    An apex that is installed stays ``apex``, and only its ``amp`` is replaced: the last ones have none.
    Calling it again does nothing.

    Example:
        >>> amp = install()
        >>> from apex import amp as imported
        >>> imported is amp
        True
        >>> uninstall()
    """
    amp = importlib.import_module("mpamp.apex.amp")
    if _replaced:
        return amp
    host = _installed_apex()
    _replaced["apex"] = sys.modules.get("apex", _ABSENT)
    if host is None:
        host = ModuleType("apex", "A stand-in of mpamp's that holds amp alone.")
        host.__path__ = []
        host.__spec__ = importlib.util.spec_from_loader("apex", None, is_package=True)
        host.DeprecatedFeatureWarning = DeprecatedFeatureWarning  # type: ignore[attr-defined]
    sys.modules["apex"] = host
    _replaced["apex.amp attribute"] = vars(host).get("amp", _ABSENT)
    host.amp = amp  # type: ignore[attr-defined]
    for name, ours in _SUBMODULES.items():
        _replaced[name] = sys.modules.get(name, _ABSENT)
        sys.modules[name] = importlib.import_module(ours)
    children.announce(_CHILDREN)
    return amp


def uninstall() -> None:
    """Undo ``install``; again does nothing."""
    if not _replaced:
        return
    children.withdraw(_CHILDREN)
    host, before = sys.modules["apex"], _replaced.pop("apex.amp attribute")
    if before is _ABSENT:
        vars(host).pop("amp", None)
    else:
        host.amp = before  # type: ignore[attr-defined]
    for name, module in _replaced.items():
        if module is _ABSENT:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module
    _replaced.clear()


def _installed_apex() -> ModuleType | None:
    """Return the apex that is installed, or None if there is none that can be imported."""
    if "apex" in sys.modules:
        return sys.modules["apex"]
    try:
        return importlib.import_module("apex")
    except Exception:  # not there; or another package of that name, which needs what isn't here
        return None
