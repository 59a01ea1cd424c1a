"""``mpamp run``: a script or a module, run as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click
import torch
from torch.overrides import TorchFunctionMode

import mpamp
from mpamp import apex as drop_in
from mpamp import children, standins
from mpamp.cli.running import run_script
from mpamp.devices.registry import device_state
from mpamp.errors import PluginConflictError, PluginLoadError

__all__ = ["run"]


class _Program(click.Command):
    """A command whose options end where the program begins: at a script, or after the module of ``-m``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with_value = {name for p in self.params if isinstance(p, click.Option) and not p.is_flag for name in p.opts}
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] not in ("-m", "--"):
            at += 2 if args[at] in with_value else 1
        if args[at : at + 1] == ["-m"] and args[at + 1 :]:
            args = [*args[: at + 2], "--", *args[at + 2 :]]
        return super().parse_args(ctx, args)


@click.command(
    cls=_Program,
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
    program: Path | str
    if module is None:
        if not arguments:
            raise click.UsageError("Missing argument 'SCRIPT', or -m MODULE.", context)
        program = click.Path(exists=True, dir_okay=False, path_type=Path).convert(arguments[0], None, context)
        arguments = arguments[1:]
    else:
        program = module
    redirection = _redirection(device_name)
    standins.install(persistent_cache=persistent_cache)
    drop_in.install()
    if table is not None:
        _use_table(table)
    with redirection:
        run_script(program, arguments)


def _use_table(file: Path) -> None:
    path = str(file.resolve())
    try:
        standins.use_table(path)
    except mpamp.MpampError as error:
        raise click.BadParameter(str(error), param_hint="--ops") from error
    children.announce("mpamp.standins:use_table", path=path)


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
