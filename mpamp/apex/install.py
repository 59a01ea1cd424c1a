"""Putting the drop-in where scripts look for it: ``apex`` and the modules in it among those that are imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from .. import children
from ..patching import Patches
from .absent import INSTEAD, AbsentFinder, AbsentModule
from .errors import DeprecatedFeatureWarning

__all__ = ["MODULES", "install", "uninstall"]

_NAMES, _FP16 = "mpamp.apex.names", "mpamp.apex.fp16_utils"
_OPTIMIZERS, _PARALLEL = "mpamp.apex.optimizers", "mpamp.apex.parallel"

MODULES: Mapping[str, str] = {
    "apex.amp": "mpamp.apex.amp",
    "apex.amp._amp_state": f"{_NAMES}.amp_state",
    "apex.amp.amp": "mpamp.apex.amp",
    "apex.amp.frontend": f"{_NAMES}.frontend",
    "apex.amp.handle": "mpamp.apex.handle",
    "apex.amp.lists": _NAMES,
    "apex.amp.lists.functional_overrides": f"{_NAMES}.functional_overrides",
    "apex.amp.lists.tensor_overrides": f"{_NAMES}.tensor_overrides",
    "apex.amp.lists.torch_overrides": f"{_NAMES}.torch_overrides",
    "apex.amp.opt": "mpamp.apex.wrapper",
    "apex.amp.scaler": "mpamp.apex.scaler",
    "apex.amp.utils": f"{_NAMES}.utils",
    "apex.fp16_utils": _FP16,
    "apex.fp16_utils.fp16_optimizer": f"{_FP16}.optimizer",
    "apex.fp16_utils.fp16util": f"{_FP16}.fp16util",
    "apex.fp16_utils.loss_scaler": f"{_FP16}.loss_scaler",
    "apex.fused_dense": "mpamp.apex.dense",
    "apex.fused_dense.fused_dense": "mpamp.apex.dense",
    "apex.mlp": "mpamp.apex.dense",
    "apex.mlp.mlp": "mpamp.apex.dense",
    "apex.multi_tensor_apply": "mpamp.apex.multi_tensor",
    "apex.multi_tensor_apply.multi_tensor_apply": "mpamp.apex.multi_tensor",
    "apex.normalization": "mpamp.apex.normalization",
    "apex.normalization.fused_layer_norm": "mpamp.apex.normalization",
    "apex.optimizers": _OPTIMIZERS,
    "apex.optimizers.fused_adagrad": f"{_OPTIMIZERS}.sgd",
    "apex.optimizers.fused_adam": f"{_OPTIMIZERS}.adam",
    "apex.optimizers.fused_lamb": f"{_OPTIMIZERS}.layerwise",
    "apex.optimizers.fused_mixed_precision_lamb": f"{_OPTIMIZERS}.layerwise",
    "apex.optimizers.fused_novograd": f"{_OPTIMIZERS}.layerwise",
    "apex.optimizers.fused_sgd": f"{_OPTIMIZERS}.sgd",
    "apex.parallel": _PARALLEL,
    "apex.parallel.LARC": f"{_PARALLEL}.larc",
    "apex.parallel.distributed": f"{_PARALLEL}.distributed",
    "apex.parallel.optimized_sync_batchnorm": f"{_PARALLEL}.batchnorm",
    "apex.parallel.sync_batchnorm": f"{_PARALLEL}.batchnorm",
    "apex.RNN": "mpamp.apex.rnn",
    "apex.RNN.RNNBackend": "mpamp.apex.rnn",
    "apex.RNN.cells": "mpamp.apex.rnn",
    "apex.RNN.models": "mpamp.apex.rnn",
    "amp_C": "mpamp.apex.multi_tensor",
    "apex_C": "mpamp.apex.multi_tensor",
}
"""By apex's name of a module: ours. Each stands behind the package that it is in."""

_ABSENT = object()
_CHILDREN = "mpamp.apex:install"
_replaced: dict[str, Any] = {}
_attributes = Patches()
_finder = AbsentFinder()


def install() -> ModuleType:
    """Have ``from apex import amp`` give ``mpamp.apex.amp``, in child processes too; return ``apex.amp``.

    ``MODULES`` are there too, and what else apex has can be imported and says at its first call what to use instead.
    An apex that is installed stays ``apex``, and only its ``amp`` is replaced: the last ones have none.
    Calling it again does nothing.

    Example:
        >>> amp = install()
        >>> from apex import amp as imported
        >>> from apex.optimizers import FusedAdam
        >>> imported is amp
        True
        >>> uninstall()
    """
    amp = importlib.import_module("mpamp.apex.amp")
    if _replaced:
        return amp
    host, modules = _installed_apex(), dict(MODULES)
    if host is None:
        host = _stand_in()
        sys.meta_path.insert(0, _finder)
    else:
        modules = {name: ours for name, ours in MODULES.items() if f"{name}.".startswith("apex.amp.")}
    _put("apex", host)
    for name, ours in modules.items():
        _put(name, importlib.import_module(ours))
    for name in INSTEAD:
        if name.startswith("apex.amp."):  # which isn't a package, so that no finder is asked
            _put(name, AbsentModule(name))
    children.announce(_CHILDREN)
    return amp


def _put(name: str, module: ModuleType) -> None:
    """Have a module be imported by this name, and be an attribute of its package where that has none yet."""
    _replaced[name] = sys.modules.get(name, _ABSENT)
    sys.modules[name] = module
    package, _, last = name.rpartition(".")
    if package:
        owner = sys.modules[package]
        if last not in vars(owner) or name == "apex.amp":
            _attributes.put(owner, last, module)


def uninstall() -> None:
    """Undo ``install``; again does nothing."""
    if not _replaced:
        return
    children.withdraw(_CHILDREN)
    _attributes.undo()
    for name, module in _replaced.items():
        if module is _ABSENT:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module
    _replaced.clear()
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    _finder.forget()


def _stand_in() -> ModuleType:
    """Return what ``apex`` is where none is installed."""
    made = ModuleType("apex", "mpamp's stand-in for NVIDIA's apex.")
    made.__path__ = []
    made.__spec__ = importlib.util.spec_from_loader("apex", None, is_package=True)
    made.DeprecatedFeatureWarning = DeprecatedFeatureWarning  # type: ignore[attr-defined]

    def find(name: str) -> Any:
        if f"apex.{name}" not in INSTEAD:
            raise AttributeError(f"module 'apex' has no attribute {name!r}")
        return importlib.import_module(f"apex.{name}")

    made.__getattr__ = find  # type: ignore[method-assign]
    return made


def _installed_apex() -> ModuleType | None:
    """Return the apex that is installed, or None if there is none that can be imported."""
    if "apex" in sys.modules:
        return sys.modules["apex"]
    try:
        return importlib.import_module("apex")
    except Exception:  # not there; or another package of that name, which needs what isn't here
        return None
