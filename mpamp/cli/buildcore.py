"""``mpamp build-core``: compile the engine against the installed torch."""

from __future__ import annotations

import click

from mpamp import engine
from mpamp.errors import EngineError

__all__ = ["build_core"]


@click.command("build-core")
@click.option("--force", is_flag=True, help="Build although there is a build.")
def build_core(force: bool) -> None:
    """Compile the engine for the installed torch: a minute, once.

    It needs a C++ compiler and ninja (mpamp[native]). The library goes into the user's cache directory, and every
    process takes it from then on; MPAMP_ENGINE=python goes without. Another torch or mpamp needs a build of its own.
    """
    try:
        click.echo(engine.build_core(force=force))
    except EngineError as error:
        raise click.ClickException(str(error)) from error
