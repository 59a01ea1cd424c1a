"""An op pack whose rules name a policy that there isn't."""

from __future__ import annotations

from mpamp.plugins.hookspecs import hookimpl


@hookimpl
def mpamp_op_rules(device_type: str) -> dict[str, str]:
    return {"softmax": "lukewarm"}
