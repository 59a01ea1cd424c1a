"""``mpamp run``: a script or a module, run as it is."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click
import torch

import mpamp
from mpamp import apex as drop_in
from mpamp import children, standins
from mpamp.cli.running import Program, program_of, run_script
from mpamp.devices.registry import device_state
from mpamp.errors import PluginConflictError, PluginLoadError
from mpamp.redirect import advice, redirect
from mpamp.redirect.target import Target

__all__ = ["run"]

_CHILDREN = "mpamp.redirect.redirection:resume"


@click.command(
    cls=Program,
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS] SCRIPT | -m MODULE",
)
@click.option(
    "--device", "device_name", help="Where tensors go that the script puts on a device which isn't on this machine."
)
@click.option(
    "--ops",
    "table",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="An op table (TOML) for the whole program.",
)
@click.option("--persistent-cache", is_flag=True, help="Keep casts of weights from region to region.")
@click.option(
    "--report", type=click.Path(dir_okay=False, path_type=Path), help="Write a report of the run to this file."
)
@click.option("-m", "module", help="Run a module or package by its name, as python -m.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(
    context: click.Context,
    device_name: str | None,
    table: Path | None,
    persistent_cache: bool,
    report: Path | None,
    module: str | None,
    arguments: tuple[str, ...],
) -> None:
    """Run a script or module, which stays as it is, with mpamp's amp as `torch.amp` and as `apex.amp`.

    What comes after SCRIPT, or after `-m MODULE`, are its own arguments.
    """
    program, arguments = program_of(context, module, arguments)
    redirection = _redirection(device_name)
    if table is not None:
        _use_table(table)
    standins.install(persistent_cache=persistent_cache)  # before torch's functions of autocast state are replaced
    drop_in.install()
    with redirection, _reporting(report, program, arguments):
        run_script(program, arguments)


def _reporting(file: Path | None, program: Path | str, arguments: tuple[str, ...]) -> AbstractContextManager[Any]:
    if file is None:
        return nullcontext()
    from mpamp.cli.report import reported  # not before: it needs what only reports do

    return reported(file, program, arguments)


def _use_table(file: Path) -> None:
    path = str(file.resolve())
    try:
        standins.use_table(path)
    except mpamp.MpampError as error:
        raise click.BadParameter(str(error), param_hint="--ops") from error
    children.announce("mpamp.standins.rules:await_device", path=path)


@contextmanager
def _advice() -> Iterator[None]:
    """Have a script that dies for want of a device told of ``--device``, below its traceback."""
    try:
        yield
    except Exception as error:
        line = advice(error)
        if line is not None:
            sys.excepthook = functools.partial(_report, sys.excepthook, line)
        raise
    except SystemExit as error:
        line = advice(error) if isinstance(error.code, str) else None  # what it says is printed when Python ends
        if line is not None:
            print(line, file=sys.stderr)
        raise


def _report(hook: Callable[..., Any], line: str, *error: Any) -> None:
    hook(*error)
    print(line, file=sys.stderr)


def _redirection(name: str | None) -> AbstractContextManager[Any]:
    if name is None:
        return _advice()
    try:
        backend = device_state(name.partition(":")[0]).backend  # before torch is asked: the plugin may bring it
        device = torch.device(name)
        is_here = backend.is_available()
    except (PluginConflictError, PluginLoadError) as error:
        raise click.ClickException(str(error)) from error
    except (RuntimeError, mpamp.MpampError) as error:
        raise click.BadParameter(str(error), param_hint="--device") from error
    if not is_here:
        raise click.BadParameter(f"there is no {device.type} device on this machine", param_hint="--device")
    return _redirected(device)


@contextmanager
def _redirected(device: torch.device) -> Iterator[None]:
    """Redirect here and in child processes, where that comes after what was installed before."""
    children.announce(_CHILDREN, device=str(device), absent=Target(device).absent)
    try:
        with redirect(device):
            yield
    finally:
        children.withdraw(_CHILDREN)
