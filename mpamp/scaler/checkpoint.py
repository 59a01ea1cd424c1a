"""Reads the saved states of torch's scaler and of apex.amp."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..errors import MpampWarning, ScalerSettingError, ScalerStateError
from .state import ScaleState, check_number

__all__ = ["KEYS", "read_state"]

KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_APEX_PREFIX = "loss_scaler"


def read_state(saved: Any, current: ScaleState) -> ScaleState:
    """Return the state that a saved one stands for; a scale out of the current bounds is moved, with a warning.

    Args:
        saved: What ``state_dict()`` of a GradScaler gave, or ``apex.amp.state_dict()``. apex saves no factors and no
            interval: they stay the current ones.
        current: The state of the scaler that loads it.

    Raises:
        ScalerStateError: It is neither, or holds a value that can't be.

    Example:
        >>> read_state({"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7}}, ScaleState()).growth_tracker
        7
    """
    if not isinstance(saved, Mapping):
        raise ScalerStateError(f"a scaler's state is a dict, got {type(saved).__name__}.")
    if not saved:
        raise ScalerStateError(
            "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler."
        )
    values = _from_apex(saved) if _is_apex(saved) else _from_torch(saved)
    try:
        scale = check_number("scale", values.pop("scale"))
        state = replace(current, scale=min(max(scale, current.min_scale), current.max_scale), **values)
    except ScalerSettingError as error:
        raise ScalerStateError(f"the state dict is corrupt: {error} The scaler is left as it was.") from error
    if not current.min_scale <= scale <= current.max_scale:
        warnings.warn(
            f"the loaded scale {scale:g} is out of [min_scale, max_scale]; it is {state.scale:g} now.",
            MpampWarning,
            stacklevel=3,
        )
    return state


def _from_torch(saved: Mapping[str, Any]) -> dict[str, Any]:
    missing = [key for key in KEYS if key not in saved]
    if missing:
        raise ScalerStateError(
            f"this is not a GradScaler's state: {', '.join(map(repr, missing))} missing, it has "
            f"{', '.join(map(repr, list(saved)[:8]))}. The scaler is left as it was."
        )
    return {key.lstrip("_"): _plain(saved[key]) for key in KEYS}


def _is_apex(saved: Mapping[str, Any]) -> bool:
    return all(str(key).startswith(_APEX_PREFIX) and isinstance(value, Mapping) for key, value in saved.items())


def _from_apex(saved: Mapping[str, Any]) -> dict[str, Any]:
    first, *others = saved.values()
    if any(dict(other) != dict(first) for other in others):
        raise ScalerStateError(
            f"apex.amp saved {len(saved)} loss scalers that differ: {dict(saved)}. Choose the one for this scaler, as "
            'in scaler.load_state_dict({"loss_scaler0": state["loss_scaler1"]}).'
        )
    if not {"loss_scale", "unskipped"} <= set(first):
        raise ScalerStateError(f"this is not apex.amp's state: {dict(saved)}. The scaler is left as it was.")
    return {"scale": _plain(first["loss_scale"]), "growth_tracker": _plain(first["unskipped"])}


def _plain(value: Any) -> Any:
    """Return the number in a one-element tensor, as some checkpoint formats make of numbers."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
