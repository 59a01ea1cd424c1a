"""Automatic mixed precision for PyTorch on every device."""

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .devices.registry import get_backend, get_op_table, set_op_rules
from .engine.casts.cache import CacheInfo, cache_info, clear_cache
from .engine.casts.checking import StaleCast, verify_cache
from .errors import (
    BannedOpError,
    Fp16GradientError,
    GradientOverflowError,
    ModuleRuleError,
    MpampError,
    MpampWarning,
    OpTableError,
    PluginConflictError,
    PluginLoadError,
    RedirectError,
    RegionError,
    ScalerSettingError,
    ScalerStateError,
    ScalerUsageError,
    StaleCastError,
    UnknownDeviceError,
    UnknownOpError,
    UnknownPolicyError,
    UnsupportedDtypeError,
)
from .functions.annotated import float_function, lower_precision_function, promote_function
from .functions.custom import custom_bwd, custom_fwd
from .functions.module_rules import ModuleRules, module_rules
from .functions.registration import (
    register_float_function,
    register_lower_precision_function,
    register_op,
    register_promote_function,
    unregister_float_function,
    unregister_lower_precision_function,
    unregister_op,
    unregister_promote_function,
)
from .insight import explain, reporting, trace
from .plugins.backend import Backend
from .regions.region import Region, autocast
from .regions.threads import inherit_regions
from .rules.optable import OpTable
from .rules.policy import CastPolicy
from .scaler import GradScaler, ScaleEvent, ScalerConfig, ScaleRecord, ScaleState, StepResult

if TYPE_CHECKING:
    from .insight.overflow import OverflowFinder, find_overflow
    from .insight.search import search_precision
    from .insight.search_result import PrecisionSearch
    from .standins import Installation, install, uninstall

_LATER = {
    "Installation": "standins",
    "OverflowFinder": "insight.overflow",
    "PrecisionSearch": "insight.search_result",
    "find_overflow": "insight.overflow",
    "install": "standins",
    "search_precision": "insight.search",
    "uninstall": "standins",
}
"""Names for an occasion, whose modules are imported when they are first asked for."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


__all__ = [
    "Backend",
    "BannedOpError",
    "CacheInfo",
    "CastPolicy",
    "Fp16GradientError",
    "GradScaler",
    "GradientOverflowError",
    "Installation",
    "ModuleRuleError",
    "ModuleRules",
    "MpampError",
    "MpampWarning",
    "OpTable",
    "OpTableError",
    "OverflowFinder",
    "PluginConflictError",
    "PluginLoadError",
    "RedirectError",
    "PrecisionSearch",
    "Region",
    "RegionError",
    "ScaleEvent",
    "ScaleRecord",
    "ScaleState",
    "ScalerConfig",
    "ScalerSettingError",
    "ScalerStateError",
    "ScalerUsageError",
    "StaleCast",
    "StaleCastError",
    "StepResult",
    "UnknownDeviceError",
    "UnknownOpError",
    "UnknownPolicyError",
    "UnsupportedDtypeError",
    "__version__",
    "autocast",
    "cache_info",
    "clear_cache",
    "custom_bwd",
    "custom_fwd",
    "explain",
    "find_overflow",
    "float_function",
    "get_backend",
    "get_op_table",
    "inherit_regions",
    "install",
    "module_rules",
    "lower_precision_function",
    "promote_function",
    "register_float_function",
    "register_lower_precision_function",
    "register_op",
    "register_promote_function",
    "reporting",
    "search_precision",
    "set_op_rules",
    "trace",
    "uninstall",
    "unregister_float_function",
    "unregister_lower_precision_function",
    "unregister_op",
    "unregister_promote_function",
    "verify_cache",
]
