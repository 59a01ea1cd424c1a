"""``mpamp run``: a script that imports apex, run as it is."""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click
import torch

import mpamp
from mpamp.apex import install
from mpamp.devices.registry import device_state
from mpamp.errors import PluginConflictError, PluginLoadError
from mpamp.redirect import advice, redirect

__all__ = ["run"]

INTERRUPTED = 130
"""The exit code of a process that Ctrl-C ended."""


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--device", "device_name", help="Where tensors go that the script puts on a device which isn't on this machine."
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(device_name: str | None, script: Path, arguments: tuple[str, ...]) -> None:
    """Run SCRIPT with its ARGUMENTS, and with mpamp's amp as `apex.amp`.

    The script stays as it is: `from apex import amp` and everything after it.
    """
    redirection = _redirection(device_name)
    install()
    sys.argv = [str(script), *arguments]
    sys.path[0:0] = [str(script.resolve().parent)]
    try:
        with redirection, nullcontext() if device_name else _advice():
            runpy.run_path(str(script), run_name="__main__")
    except (EOFError, OSError, KeyboardInterrupt, click.ClickException, click.Abort, click.exceptions.Exit) as error:
        # click takes these for its own, and hides them: end as Python does.
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)


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


def _report(hook: Callable[..., Any], line: str, *error: Any) -> None:
    hook(*error)
    print(line, file=sys.stderr)


def _redirection(name: str | None) -> AbstractContextManager[Any]:
    if name is None:
        return nullcontext()
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
    return redirect(device)
