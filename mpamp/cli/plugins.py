"""``mpamp plugins``: every plugin found, and what became of it."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import click

from mpamp.cli.output import PROBLEM, print_json, print_table, quietly
from mpamp.devices.registry import get_backend
from mpamp.errors import MpampError, told
from mpamp.plugins.manager import PluginInfo, manager

__all__ = ["examine_all", "load_all", "plugins", "plugins_left_out", "record"]

FAULTY = ("failed", "conflict")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plugins(as_json: bool) -> None:
    """List the plugins that are installed, each loaded to see whether it works.

    A status is loaded, blocked (MPAMP_DISABLE_PLUGINS, MPAMP_LOAD_PLUGINS), failed, conflict, or found (it wasn't
    needed). The exit code is 1 if a plugin failed or is in conflict.
    """
    problems = examine_all()
    records = [record(info) for info in manager().listing()]
    if as_json:
        print_json({"plugins": records, "problems": list(problems.values())})
    else:
        headings = ("name", "distribution", "version", "status", "error")
        print_table("Plugins", headings, [[r[h] or "" for h in headings] for r in records])
        for device, problem in problems.items():
            click.echo(f"{device}: {problem}", err=True)
    if problems or any(r["status"] in FAULTY for r in records):
        raise SystemExit(PROBLEM)


def load_all() -> dict[str, str]:
    """Load what every known device needs, and return what was wrong, by device type."""
    problems = {}
    with quietly():
        for device in manager().known_devices():
            try:
                get_backend(device)
            except MpampError as error:
                problems[device] = str(error)
    return problems


def examine_all() -> dict[str, str]:
    """Load everything that plugins bring, their commands too; return what was wrong, by device type or part."""
    problems = load_all()
    command: Any = click.get_current_context().find_root().command
    with quietly():
        try:
            command.take_in_plugins()
        except MpampError as error:
            problems["commands"] = str(error)
    return problems


def plugins_left_out(*, but: Container[str] = ()) -> list[str]:
    """Return a line for each plugin that failed or is in conflict, but those of some names."""
    faulty = [p for p in map(record, manager().listing()) if p["status"] in FAULTY and p["name"] not in but]
    return [f"plugin {p['name']} of {p['distribution']} is left out: {p['error']}" for p in faulty]


def record(info: PluginInfo) -> dict[str, Any]:
    """Return one plugin as plain data."""
    error = info.error
    return {
        "name": info.name,
        "distribution": info.distribution,
        "version": info.version,
        "module": info.module,
        "status": info.status,
        "error": None if error is None else told(error),
    }
