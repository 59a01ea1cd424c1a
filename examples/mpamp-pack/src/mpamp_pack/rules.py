"""The plugin: rules for the pack's own ops, and for one of torch's."""

from __future__ import annotations

import torch

from mpamp.plugins.hookspecs import hookimpl

from . import library  # noqa: F401  # rules are for ops that torch knows

__all__ = ["mpamp_op_rules"]

OWN = {
    "mpamp_pack::scores": "lower_precision_fp",
    "mpamp_pack::entropy": "fp32",
    "mpamp_pack::join": "promote",
}


@hookimpl
def mpamp_op_rules(device_type: str, dtype: torch.dtype) -> dict[str, str]:
    # The pack's users feed logit() with probabilities near 1, which float16 rounds to 1.
    return {**OWN, "logit": "fp32"} if dtype is torch.float16 else OWN
