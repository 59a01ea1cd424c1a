"""One of two op packs that disagree."""

from __future__ import annotations

from mpamp.plugins.hookspecs import hookimpl


@hookimpl
def mpamp_op_rules(device_type: str) -> dict[str, str]:
    return {"softmax": "fp32", "relu": "fp32"}
