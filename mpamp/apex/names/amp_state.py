"""``apex.amp._amp_state``."""

from ..initialize import master_params
from ..state import AmpState, say, say_on_first_rank
from ..state import state as _amp_state
from ..state import warn_or_raise as warn_or_err

__all__ = ["AmpState", "_amp_state", "master_params", "maybe_print", "warn_or_err"]


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Print unless verbosity is 0, on every rank or on the first one.

    Example:
        >>> _amp_state.verbosity = 1
        >>> maybe_print("Gradient overflow.", rank0=True)
        Gradient overflow.
    """
    (say_on_first_rank if rank0 else say)(msg)
