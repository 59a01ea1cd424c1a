"""A progress bar, where there is a terminal to show it and ``rich`` to draw it."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator

__all__ = ["progress_bar"]


@contextlib.contextmanager
def progress_bar(is_wanted: bool) -> Iterator[Callable[[int], None]]:
    """Yield what is told how many evaluations were made."""
    if not is_wanted or not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.completed:.0f} evaluations"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("search", total=None)
        yield lambda count: progress.update(task, completed=count)
