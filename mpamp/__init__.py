"""Automatic mixed precision for PyTorch on every device."""

from ._version import __version__
from .autocast import Region, autocast
from .backends.base import Backend
from .castcache import CacheInfo, cache_info, clear_cache
from .errors import (
    BannedOpError,
    MpampError,
    MpampWarning,
    OpTableError,
    PluginConflictError,
    PluginLoadError,
    RegionError,
    UnknownDeviceError,
    UnknownOpError,
    UnknownPolicyError,
    UnsupportedDtypeError,
)
from .optable import OpTable
from .policy import CastPolicy
from .registry import get_backend, get_op_table, set_op_rules
from .threads import inherit_regions

__all__ = [
    "Backend",
    "BannedOpError",
    "CacheInfo",
    "CastPolicy",
    "MpampError",
    "MpampWarning",
    "OpTable",
    "OpTableError",
    "PluginConflictError",
    "PluginLoadError",
    "Region",
    "RegionError",
    "UnknownDeviceError",
    "UnknownOpError",
    "UnknownPolicyError",
    "UnsupportedDtypeError",
    "__version__",
    "autocast",
    "cache_info",
    "clear_cache",
    "get_backend",
    "get_op_table",
    "inherit_regions",
    "set_op_rules",
]
