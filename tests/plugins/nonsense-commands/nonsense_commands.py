"""A plugin that raises when it is asked for its commands."""

from __future__ import annotations

from typing import Any

from mpamp.plugins.hookspecs import hookimpl


@hookimpl
def mpamp_cli(app: Any) -> None:
    app.add_command("tune")
