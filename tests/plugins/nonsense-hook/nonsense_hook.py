"""A plugin with a hook that mpamp doesn't have."""

from __future__ import annotations

from mpamp.plugins.hookspecs import hookimpl


@hookimpl
def mpamp_backend() -> None:
    pass
