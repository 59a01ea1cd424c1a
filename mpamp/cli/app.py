"""The command group that all commands hang on."""

from __future__ import annotations

import click

from mpamp._version import __version__
from mpamp.cli.demo import demo
from mpamp.cli.doctor import doctor
from mpamp.cli.ops import ops
from mpamp.cli.plugins import plugins
from mpamp.cli.run import run

__all__ = ["app"]


@click.group(name="mpamp", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mpamp")
def app() -> None:
    """Automatic mixed precision for PyTorch on every device."""


for command in (demo, doctor, ops, plugins, run):
    app.add_command(command)
