"""Every error and warning of mpamp, under one root each."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

__all__ = [
    "BannedOpError",
    "EngineError",
    "Fp16GradientError",
    "GradientOverflowError",
    "ModuleRuleError",
    "MpampError",
    "MpampWarning",
    "OpTableError",
    "PluginConflictError",
    "PluginLoadError",
    "RedirectError",
    "RegionError",
    "ScalerSettingError",
    "ScalerStateError",
    "ScalerUsageError",
    "StaleCastError",
    "UnknownDeviceError",
    "UnknownOpError",
    "UnknownPolicyError",
    "UnsupportedDtypeError",
]


class MpampError(Exception):
    """Root of every error that mpamp raises."""


class MpampWarning(UserWarning):
    """Root of every warning that mpamp gives; each comes once per process."""


class EngineError(MpampError, RuntimeError):
    """The compiled engine can't be built, or can't be used although it was asked for."""


class RedirectError(MpampError, RuntimeError):
    """A script that runs on another device than it was written for does what only the one it was written for can."""


class RegionError(MpampError, RuntimeError):
    """A region was entered, left or applied in a way that can't work."""


class UnknownDeviceError(MpampError, ValueError, RuntimeError):
    """No backend covers the device type that was asked for; torch raises a RuntimeError then."""


class UnsupportedDtypeError(MpampError, ValueError):
    """The backend can't run regions in the dtype that was asked for."""


class OpTableError(MpampError, ValueError):
    """An op table is malformed, or doesn't belong to the device that it was given for."""


class UnknownOpError(OpTableError, LookupError):
    """A rule names an op that torch doesn't know, or that no rule can apply to."""


class UnknownPolicyError(OpTableError):
    """A rule names a policy that doesn't exist."""


class ModuleRuleError(MpampError, ValueError):
    """A module rule means no module of the model, contradicts another one, or says what can't be."""


class StaleCastError(MpampError, RuntimeError):
    """A weight was written in a way that nothing can see, and its kept cast is of what it was before."""


class BannedOpError(MpampError, NotImplementedError):
    """A banned op was called with lower-precision arguments."""


class PluginLoadError(MpampError, ImportError):
    """A plugin was found but could not be loaded, or fails when it is asked something; its cause is attached."""


class PluginConflictError(MpampError):
    """Two plugins claim the same device, or give one op different policies."""

    plugins: tuple[str, ...] = ()
    """The plugins whose rules differ, as they are named in messages."""


class ScalerSettingError(MpampError, ValueError):
    """A setting of a GradScaler is one that can't be."""


class ScalerStateError(MpampError, RuntimeError, ValueError):
    """What a GradScaler was to load is no scaler's state, or a corrupt one."""


class ScalerUsageError(MpampError, RuntimeError):
    """A GradScaler was used in a way that would make gradients wrong."""


class Fp16GradientError(MpampError, ValueError):
    """Gradients are float16, so the small ones among them are lost before they can be unscaled."""


class GradientOverflowError(MpampError, RuntimeError):
    """The gradients have had an inf or NaN for too many updates in a row."""


def shown(error: BaseException) -> str:
    """Return an error's ``repr``; the name of its class where others' code can't even give that.

    Example:
        >>> shown(OSError("no driver"))
        "OSError('no driver')"
    """
    return _text(error, repr)


def told(error: BaseException) -> str:
    """Return an error as a traceback ends with it.

    Example:
        >>> told(OSError("no driver"))
        'OSError: no driver'
    """
    return f"{type(error).__name__}: {_text(error, str)}"


def _text(error: BaseException, form: Callable[[BaseException], str]) -> str:
    try:
        return form(error)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return type(error).__qualname__


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """Return the end of a sentence: a hint that lists the names closest to ``name``, or a full stop.

    Example:
        >>> nearest("sofmax", ["softmax", "conv2d"])
        "; did you mean 'softmax'?"
    """
    close = difflib.get_close_matches(name, list(known), n=count, cutoff=0.6)
    return "; did you mean " + " or ".join(repr(c) for c in close) + "?" if close else "."
