"""The errors of the drop-in: each is mpamp's own and also of the kind that apex raised."""

from __future__ import annotations

from ..errors import MpampError

__all__ = [
    "AmpAssertionError",
    "AmpAttributeError",
    "AmpIndexError",
    "AmpNotImplementedError",
    "AmpTypeError",
    "AmpUsageError",
    "AmpValueError",
    "DeprecatedFeatureWarning",
]


class AmpUsageError(MpampError, RuntimeError):
    """Something was asked for at the wrong time, or an option that the opt_level doesn't allow."""


class AmpTypeError(MpampError, TypeError):
    """An argument has a type that amp can't take."""


class AmpValueError(MpampError, ValueError):
    """An argument has the right type and a value that can't be."""


class AmpAssertionError(MpampError, AssertionError):
    """A value that apex asserted against."""


class AmpAttributeError(MpampError, AttributeError):
    """An object lacks what ``initialize`` would have given it."""


class AmpIndexError(MpampError, IndexError):
    """There is no loss scaler of that number."""


class AmpNotImplementedError(MpampError, NotImplementedError):
    """apex's old API never had this."""


class DeprecatedFeatureWarning(FutureWarning):
    """What apex gave on use of amp; here for scripts that filter it, and never given."""
