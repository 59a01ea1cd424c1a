"""The loss scalers' state, saved and loaded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from .errors import AmpUsageError
from .state import state

__all__ = ["load_state_dict", "state_dict"]


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return each loss scaler's scale and its count of backward passes without overflow; empty without scalers.

    Example:
        >>> state_dict()
        OrderedDict()
    """
    found: dict[str, Any] = OrderedDict() if destination is None else destination
    for number, scaler in enumerate(getattr(state, "loss_scalers", [])):
        found[f"loss_scaler{number}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
    return found


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Load what ``state_dict`` returned, by position; before ``initialize`` it is kept for that.

    Raises:
        AmpUsageError: The dict isn't amp's; nothing has been loaded then.
    """
    entries = _entries(state_dict)
    scalers = getattr(state, "loss_scalers", None)
    if scalers is None:
        state.loaded = dict(state_dict)
        return
    if len(entries) != len(scalers):
        print(f"Warning: state_dict contains {len(entries)} entries, while {len(scalers)} loss_scalers are used")
    for number, (scale, unskipped) in enumerate(entries):
        if number >= len(scalers):
            print(f"Skipping loss_scaler[{number}], since num_losses was set to {len(scalers)}")
            break
        scalers[number]._loss_scale, scalers[number]._unskipped = scale, unskipped


def _entries(state_dict: Mapping[str, Any]) -> list[tuple[float, int]]:
    unexpected = [key for key in state_dict if "loss_scaler" not in str(key)]
    if unexpected:
        raise AmpUsageError(
            f"Unexpected key(s) in state_dict: {', '.join(map(repr, unexpected))}. amp's has loss_scaler0, "
            "loss_scaler1, ...; is this another object's state dict? Nothing was loaded."
        )
    try:
        return [(float(entry["loss_scale"]), int(entry["unskipped"])) for entry in state_dict.values()]
    except (TypeError, KeyError, ValueError) as error:
        raise AmpUsageError(
            f"an entry of the state_dict is not {{'loss_scale': number, 'unskipped': count}} ({error!r}). "
            "Nothing was loaded."
        ) from error
