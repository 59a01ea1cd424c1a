"""A plugin that brings a command."""

from __future__ import annotations

import click

from mpamp.plugins.hookspecs import hookimpl


@hookimpl
def mpamp_cli(app: click.Group) -> None:
    @app.command()
    @click.argument("pitch", type=float)
    def tune(pitch: float) -> None:
        """Tune to a PITCH."""
        click.echo(f"tuned to {pitch:g} Hz")
