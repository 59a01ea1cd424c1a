"""``mpamp build-core``: compile the engine against the installed torch."""

from __future__ import annotations

import click

from mpamp import engine
from mpamp.errors import EngineError

__all__ = ["build_core"]


@click.command("build-core")
@click.option("--force", is_flag=True, help="Build although there is a build.")
@click.option("--try", "may_fail", is_flag=True, help="Say why it can't be built, and succeed: Python's engine runs.")
def build_core(force: bool, may_fail: bool) -> None:
    """Compile the engine for the installed torch: a minute, once.

    For a torch that mpamp's wheel has no engine for, or a clone. It needs a C++ compiler and Python's headers. The
    library goes into the user's cache directory, and every process takes it from then on, before the wheel's;
    MPAMP_ENGINE=python goes without. Another torch or mpamp needs a build of its own.
    """
    try:
        click.echo(engine.build_core(force=force))
    except EngineError as error:
        if not may_fail:
            raise click.ClickException(str(error)) from error
        click.echo(f"The engine in Python runs: {error}", err=True)
