"""A plugin whose hook returns no backends."""

from __future__ import annotations

from mpamp.plugins.hookspecs import hookimpl


@hookimpl
def mpamp_backends() -> list[str]:
    return ["nonsense"]
