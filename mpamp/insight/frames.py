"""The calls that a call is a part of, and which of them a rule in ``ops=`` would decide."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..devices.registry import device_state
from ..engine.resolving import resolve
from ..errors import MpampError
from ..rules.optable import OpTable
from .overflow_measures import floats_in

__all__ = ["Frame", "deciding", "frame_of", "plain_name", "table_on"]


class Frame(NamedTuple):
    """One call: its overload, and what autocast had to say of it."""

    op: str
    is_autocast: bool
    """Whether the call was made under autocast, so that a rule for it counts."""
    is_listed: bool
    """Whether the table in force there has a row for it."""


def frame_of(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
    """Return what is to be known of a call that is about to be made."""
    for device in {tensor.device.type for _, tensor in floats_in([args, kwargs])}:
        table = table_on(device)
        if table is not None:
            return Frame(op, True, op in table)
    return Frame(op, False, False)


def table_on(device: str) -> OpTable | None:
    """Return the table in force on a device type; None outside of autocast."""
    try:
        if not torch.is_autocast_enabled(device):
            return None
        state = device_state(device)
    except (RuntimeError, MpampError):  # torch, or nobody, autocasts there
        return None
    scope = resolve(state)
    return state.table if scope is None else scope.table


def plain_name(op: str) -> str:
    """Return the name by which a rule means an overload and its like.

    Example:
        >>> plain_name("aten::softmax.int"), plain_name("my_lib::fru")
        ('softmax', 'my_lib::fru')
    """
    return op.removeprefix("aten::").partition(".")[0]


def deciding(frames: Sequence[Frame]) -> str | None:
    """Return the op whose rule decides what dtypes a call runs in, or None if no rule can.

    That is the innermost one that the table lists, else the outermost one that it may list.

    Example:
        >>> deciding([Frame("aten::tensordot", True, False), Frame("aten::mm", True, True)])
        'mm'
        >>> deciding([Frame("aten::softmax.int", True, False), Frame("aten::_softmax", True, False)])
        'softmax'
    """
    under = [frame for frame in frames if frame.is_autocast]
    listed = [frame.op for frame in reversed(under) if frame.is_listed]
    for op in (*listed, *(frame.op for frame in under)):
        if _can_run_in_float32(plain_name(op)):
            return plain_name(op)
    return None


_CASTS = frozenset({"to", "_to_copy", "copy", "copy_", "clone", "detach", "alias", "_autocast_to_reduced_precision"})
"""What code says of these is done whatever a rule says."""


@functools.lru_cache(maxsize=4096)
def _can_run_in_float32(op: str) -> bool:
    if op in _CASTS:
        return False
    try:
        OpTable({op: "fp32"})
    except MpampError:
        return False
    return True
