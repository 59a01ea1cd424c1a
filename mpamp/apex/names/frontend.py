"""``apex.amp.frontend``."""

from ..checkpoint import load_state_dict, state_dict
from ..initialize import initialize
from ..properties import OPT_LEVELS as opt_levels
from ..properties import Properties
from ..state import state as _amp_state
from ..state import warn_or_raise as warn_or_err
from .amp_state import maybe_print

__all__ = [
    "Properties",
    "_amp_state",
    "initialize",
    "load_state_dict",
    "maybe_print",
    "opt_levels",
    "state_dict",
    "warn_or_err",
]
