"""apex.amp's public names: ``from mpamp.apex import amp``."""

from __future__ import annotations

import sys
from typing import Any

from ..functions.annotated import float_function, promote_function
from ..functions.annotated import lower_precision_function as half_function
from ..functions.registration import register_float_function, register_promote_function
from ..functions.registration import register_lower_precision_function as register_half_function
from . import handle, scaler
from .checkpoint import load_state_dict, state_dict
from .handle import AmpHandle, NoOpHandle, disable_casts, init
from .initialize import initialize, master_params, shutdown
from .scale import scale_loss, unscale
from .state import state as _amp_state
from .wrapper import OptimWrapper

__all__ = [
    "AmpHandle",
    "NoOpHandle",
    "OptimWrapper",
    "_amp_state",
    "amp",
    "disable_casts",
    "float_function",
    "half_function",
    "handle",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "scaler",
    "shutdown",
    "state_dict",
    "unscale",
]

amp = sys.modules[__name__]
"""apex has a module of this name in the package of this name."""


def __getattr__(name: str) -> Any:
    if name == "_DECORATOR_HANDLE":
        return getattr(_amp_state, "handle", NoOpHandle())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
