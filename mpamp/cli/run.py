"""``mpamp run``: a script that imports apex, run as it is."""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click
import torch
from torch.overrides import TorchFunctionMode

import mpamp
from mpamp.apex import install
from mpamp.devices.registry import device_state
from mpamp.errors import PluginConflictError, PluginLoadError

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
        with redirection:
            runpy.run_path(str(script), run_name="__main__")
    except (EOFError, OSError, KeyboardInterrupt, click.ClickException, click.Abort, click.exceptions.Exit) as error:
        # click takes these for its own, and hides them: end as Python does.
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)


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
    return _Redirect(device)


class _Redirect(TorchFunctionMode):
    """Sends to one device what is meant for a device that this machine lacks, by name or by ``tensor.<device>()``."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], torch.Tensor) and _is_absent(name):
            return args[0].to(self.device)
        kwargs = {key: self._present(value) if key == "device" else value for key, value in (kwargs or {}).items()}
        if name in ("to", "set_default_device"):
            args = tuple(self._present(value) for value in args)
        return func(*args, **kwargs)

    def _present(self, value: Any) -> Any:
        name = value.type if isinstance(value, torch.device) else value
        return self.device if isinstance(name, str) and _is_absent(name.partition(":")[0]) else value


@functools.cache
def _is_absent(name: str) -> bool:
    """Tell whether this is the name of a device type that has AMP, and of which this machine has none."""
    try:
        return torch.amp.is_autocast_available(name) and not device_state(name).backend.is_available()
    except (RuntimeError, mpamp.MpampError):
        return False
