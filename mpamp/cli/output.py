"""What the reporting commands share: exit codes, errors and ways to print."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from mpamp.errors import MpampError, MpampWarning, PluginConflictError, PluginLoadError

__all__ = ["PROBLEM", "console", "dtype_name", "errors_as_exits", "print_json", "print_table", "quietly"]

PROBLEM = 1
"""The exit code of a problem found; 0 is all well and 2, click's own, a wrong way to call the command."""


@contextmanager
def errors_as_exits() -> Iterator[None]:
    """Show mpamp's own errors as the command's: 1 where a plugin is at fault, else 2 for what was asked.

    Example:
        >>> with errors_as_exits():
        ...     raise MpampError("unknown device 'xpv'")
        Traceback (most recent call last):
        click.exceptions.UsageError: unknown device 'xpv'
    """
    try:
        yield
    except (PluginLoadError, PluginConflictError) as error:
        raise click.ClickException(str(error)) from error  # exit code 1
    except MpampError as error:
        raise click.UsageError(str(error)) from error


@contextmanager
def quietly() -> Iterator[None]:
    """Keep warnings of plugins that are left out to oneself: the report has them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MpampWarning)
        yield


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name without ``torch.``.

    Example:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def print_json(report: Any) -> None:
    """Print a report as JSON, and nothing else."""
    click.echo(json.dumps(report, indent=2))


def print_table(title: str, headings: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print rows under a title; into a pipe, each on one line."""
    table = Table(*headings, title=title, title_justify="left", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console().print(table)


def console() -> Console:
    """Return what prints tables: as wide as the terminal; into a pipe, each row on one line."""
    return Console(width=None if sys.stdout.isatty() else 10_000, markup=False, highlight=False)
