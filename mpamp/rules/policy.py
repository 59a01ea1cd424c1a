"""What may be decided about one op, and the dtype that each decision gives a call's arguments."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum

import torch

from ..errors import BannedOpError, UnknownPolicyError, nearest

__all__ = ["CASTABLE", "LARGEST", "RAISING", "CastPolicy", "target_dtype"]

CASTABLE: frozenset[torch.dtype] = frozenset(
    d for d in vars(torch).values() if isinstance(d, torch.dtype) and d.is_floating_point and d is not torch.float64
)
"""Dtypes that autocast may change: all floating ones, float8 among them, other than float64.

The compiled engine is given this list. Source: ``is_eligible`` of ``aten/src/ATen/autocast_mode.h``.
"""


def _largest(dtype: torch.dtype) -> float:
    try:
        return torch.finfo(dtype).max
    except NotImplementedError:  # of two numbers packed in one, which torch casts neither
        return math.inf


LARGEST = {dtype: _largest(dtype) for dtype in CASTABLE}
"""The largest number that a tensor of a dtype may hold."""


class CastPolicy(str, Enum):
    """What autocast does to the arguments of an op; the names are torch's own.

    Source: the policies of ``aten/src/ATen/autocast_mode.h`` and torch's op reference
    (https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference).

    Example:
        >>> CastPolicy("fp32") is CastPolicy.FP32
        True
    """

    LOWER_PRECISION_FP = "lower_precision_fp"
    """Cast eligible arguments to the region's dtype."""
    FP32 = "fp32"
    """Cast eligible arguments to float32."""
    FP32_SET_OPT_DTYPE = "fp32_set_opt_dtype"
    """Cast nothing, but ask for float32 output where the call leaves ``dtype`` open."""
    FP32_APPEND_DTYPE = "fp32_append_dtype"
    """Call the overload that takes ``dtype``, with float32."""
    PROMOTE = "promote"
    """Cast eligible arguments to their widest dtype; two different 16-bit dtypes meet in float32."""
    BANNED = "banned"
    """Refuse lower-precision arguments; float32 ones run."""
    FALLTHROUGH = "fallthrough"
    """Run the op in the dtypes that it was called with, inner ops included."""

    def __str__(self) -> str:
        return self.value

    @classmethod
    def parse(cls, name: CastPolicy | str) -> CastPolicy:
        """Return the policy of that name.

        Raises:
            UnknownPolicyError: There is none; the message lists all.

        Example:
            >>> CastPolicy.parse("promote")
            <CastPolicy.PROMOTE: 'promote'>
        """
        try:
            return cls(name)
        except ValueError:
            names = [p.value for p in cls]
            raise UnknownPolicyError(
                f"unknown policy {name!r}{nearest(str(name), names)} Policies are: {', '.join(names)}."
            ) from None


REMEDY = {
    "aten::binary_cross_entropy": (
        "Its gradient overflows in lower precision. Use "
        "torch.nn.functional.binary_cross_entropy_with_logits on the logits, which is safe to autocast, "
        "or allow it in float32 by ops={'binary_cross_entropy': 'fp32'} (amp.initialize's allow_banned=True in a "
        "script for apex)."
    )
}


RAISING = frozenset({CastPolicy.FP32, CastPolicy.FP32_SET_OPT_DTYPE, CastPolicy.FP32_APPEND_DTYPE})
"""The policies that have an op give float32."""


def target_dtype(
    policy: CastPolicy | None, op: str, lower: torch.dtype, dtypes: Iterable[torch.dtype]
) -> torch.dtype | None:
    """Return the dtype that a call's eligible arguments are cast to, or None to leave them.

    Args:
        policy: The op's policy in the table in force; None for an op that the table doesn't list.
        op: The overload's name, for the message of a banned op.
        lower: The region's dtype.
        dtypes: The dtypes of the eligible arguments.

    Raises:
        BannedOpError: The op is banned and an eligible argument isn't float32.

    Example:
        >>> half, brain = torch.float16, torch.bfloat16
        >>> target_dtype(CastPolicy.PROMOTE, "aten::cat", brain, [half, brain])
        torch.float32
        >>> target_dtype(CastPolicy.PROMOTE, "aten::cat", brain, [half, half]) is None
        True
    """
    if policy is CastPolicy.LOWER_PRECISION_FP:
        return lower
    if policy is CastPolicy.FP32:
        return torch.float32
    if policy is CastPolicy.PROMOTE:
        return torch.float32 if len(set(dtypes)) > 1 else None
    if policy is CastPolicy.BANNED:
        low = next((d for d in dtypes if d is not torch.float32), None)
        if low is not None:
            allowed = "fallthrough" if op.partition(".")[0].endswith("_") else "fp32"
            remedy = REMEDY.get(op, f"Cast its arguments to float32, or allow it by ops={{{op!r}: {allowed!r}}}.")
            raise BannedOpError(f"{op} is unsafe to run on {low} arguments under autocast. {remedy}")
    return None
