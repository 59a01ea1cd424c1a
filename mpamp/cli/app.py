"""The command group that all commands hang on."""

from __future__ import annotations

from collections.abc import Mapping

import click

from mpamp._version import __version__
from mpamp.cli.bench import bench
from mpamp.cli.buildcore import build_core
from mpamp.cli.demo import demo
from mpamp.cli.doctor import doctor
from mpamp.cli.ops import ops
from mpamp.cli.output import errors_as_exits, quietly
from mpamp.cli.plugins import load_all, plugins, plugins_left_out
from mpamp.cli.report import report
from mpamp.cli.run import run
from mpamp.errors import PluginConflictError
from mpamp.plugins.manager import manager

__all__ = ["app"]


class _Commands(click.Group):
    """mpamp's own commands, and plugins': those are looked for only where mpamp's own don't do."""

    owners: dict[str, str] | None = None

    def list_commands(self, ctx: click.Context) -> list[str]:
        self._look_for_more()
        return super().list_commands(ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands:
            self._look_for_more()
        return super().get_command(ctx, cmd_name)

    def _look_for_more(self) -> None:
        """Load the plugins and take in their commands, once; say which plugins fail."""
        if self.owners is not None:
            return
        with errors_as_exits(), quietly():
            load_all()
            self.take_in_plugins()
        for line in plugins_left_out():
            click.echo(f"Warning: {line}", err=True)

    def take_in_plugins(self) -> None:
        """Take in the commands of the plugins that are loaded; all of a plugin, or none.

        Raises:
            PluginLoadError: A plugin fails, and MPAMP_STRICT_PLUGINS is 1.
        """
        self.owners = self.owners or dict.fromkeys(self.commands, "mpamp")
        for plugin, add_commands in manager().implementations("mpamp_cli"):
            if plugin not in self.owners.values():
                with manager().leaving_out(plugin, "mpamp_cli", "commands"):
                    theirs = click.Group()
                    add_commands(app=theirs)
                    self._take_in(plugin, theirs.commands)

    def _take_in(self, plugin: str, commands: Mapping[str, click.Command]) -> None:
        """Add all commands of a plugin, or none."""
        owners = self.owners or {}
        for name in commands.keys() & owners.keys():
            raise PluginConflictError(
                f"command {name!r} is claimed by both {owners[name]} and {plugin}; uninstall one, or block one by "
                "MPAMP_DISABLE_PLUGINS."
            )
        self.commands.update(commands)
        owners.update(dict.fromkeys(commands, plugin))


@click.group(name="mpamp", cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mpamp")
def app() -> None:
    """Automatic mixed precision for PyTorch on every device."""


for command in (bench, build_core, demo, doctor, ops, plugins, report, run):
    app.add_command(command)
