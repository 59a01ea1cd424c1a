"""``mpamp report``: a script run as it is, and a page about what mixed precision did in it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click

from mpamp import apex as drop_in
from mpamp import standins
from mpamp.apex import amp
from mpamp.cli.output import errors_as_exits
from mpamp.cli.running import Program, program_of, run_script
from mpamp.insight import reporting
from mpamp.insight.report.clock import Clock
from mpamp.insight.report.plain import autocast_off
from mpamp.insight.report.report import Comparison

__all__ = ["report", "reported"]

_LAST_LINES = 3


@click.command(
    cls=Program,
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS] SCRIPT | -m MODULE",
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default="report.html", show_default=True)
@click.option("--compare", type=click.Choice(["float32"]), help="Run it twice more: as it is, and with autocast off.")
@click.option(
    "--watch",
    type=click.IntRange(0),
    default=20,
    show_default=True,
    help="How many steps to look at op by op for overflow and underflow, and as many that follow a skipped one.",
)
@click.option("--measure", type=click.Path(path_type=Path), hidden=True)
@click.option("--autocast-off", "is_off", is_flag=True, hidden=True)
@click.option("-m", "module", help="Run a module or package by its name, as python -m.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def report(
    context: click.Context,
    out: Path,
    compare: str | None,
    watch: int,
    measure: Path | None,
    is_off: bool,
    module: str | None,
    arguments: tuple[str, ...],
) -> None:
    """Run a script or module as it is, and write an HTML page: casts, loss scale, overflow, advice.

    What comes after SCRIPT, or after `-m MODULE`, are its own arguments. The page is written however the program ends,
    and the exit code is the program's.
    """
    program, arguments = program_of(context, module, arguments)
    standins.install()
    drop_in.install()
    if measure is not None:
        with _measured(measure, is_off):
            run_script(program, arguments)
        return
    with reported(out, program, arguments, watch=watch, compare=compare):
        run_script(program, arguments)


@contextmanager
def reported(
    out: Path, script: Path | str, arguments: tuple[str, ...], *, watch: int = 20, compare: str | None = None
) -> Iterator[None]:
    """Write a report of the script that runs inside."""
    again = None if compare is None else partial(_compared, script, arguments)
    with errors_as_exits():
        collecting = reporting(_of_this_rank(out), shlex.join((*_shown(script), *arguments)), watch=watch)
    collecting.compare = again
    try:
        with _terminated_as_exit(), collecting:
            yield
    finally:
        if collecting.report is not None:
            click.echo(f"mpamp: the report is in {collecting.path}", err=True)


def _shown(program: Path | str) -> tuple[str, ...]:
    return ("-m", program) if isinstance(program, str) else (str(program),)


@contextmanager
def _terminated_as_exit() -> Iterator[None]:
    """Have a program that is told to terminate, as by a batch system, end in a way that leaves time for a report."""

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    is_ours = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, end) if is_ours else None
    try:
        yield
    finally:
        if is_ours and signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, before)


def _of_this_rank(out: Path) -> Path:
    """Return the file of this process, where several run the script side by side."""
    rank = os.environ.get("RANK")
    return out if rank is None or os.environ.get("WORLD_SIZE") == "1" else out.with_stem(f"{out.stem}.rank{rank}")


# -- Beside float32 ------------------------------------------------------------------------------------


@contextmanager
def _measured(file: Path, is_off: bool) -> Iterator[None]:
    """Write how long the script inside takes, and its memory."""
    clock = Clock()
    with ExitStack() as stack:
        if is_off:
            stack.enter_context(autocast_off())
            amp.initialize = partial(amp.initialize, enabled=False)
            amp.init = partial(amp.init, enabled=False)
        stack.enter_context(clock.running())
        yield
    file.write_text(json.dumps(clock.to_dict()), encoding="utf-8")


def _compared(script: Path | str, arguments: tuple[str, ...]) -> Comparison:
    """Run the script in two processes of their own, in mixed precision and in float32."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, more in (("as it is", ()), ("float32", ("--autocast-off",))):
            file = Path(folder) / "measured.json"
            file.unlink(missing_ok=True)
            click.echo(f"mpamp: runs the script again, {name}, to measure it", err=True)
            options = ["--measure", str(file), *more]
            command = [sys.executable, "-m", "mpamp", "report", *options, *_shown(script), *arguments]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            if not file.exists():
                last = " / ".join(done.stderr.strip().splitlines()[-_LAST_LINES:])
                return Comparison("float32", problem=f"Run again, {name}, it ended with {done.returncode}: {last}")
            found.append(json.loads(file.read_text(encoding="utf-8")))
    mixed, plain = found
    return Comparison("float32", mixed, plain)
