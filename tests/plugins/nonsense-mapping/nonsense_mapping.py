"""An op pack whose hook returns no mapping."""

from __future__ import annotations

from mpamp.plugins.hookspecs import hookimpl


@hookimpl
def mpamp_op_rules(device_type: str) -> int:
    return 42
