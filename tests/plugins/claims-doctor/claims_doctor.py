"""A plugin whose commands take the name of one of mpamp's."""

from __future__ import annotations

import click

from mpamp.plugins.hookspecs import hookimpl


@hookimpl
def mpamp_cli(app: click.Group) -> None:
    for name in ("surgeon", "doctor"):
        app.add_command(click.Command(name, callback=lambda: click.echo("claimed")))
