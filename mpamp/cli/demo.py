"""``mpamp demo``: the same training in float32 and in mixed precision, side by side."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mpamp.cli.picking import pick_device
from mpamp.devices.registry import device_state

if TYPE_CHECKING:
    from mpamp.cli.demo_training import TrainingRun

__all__ = ["demo"]

_SHORT_DTYPE_NAMES = {"fp16": "float16", "half": "float16", "bf16": "bfloat16"}


@click.command()
@click.option("--device", "device_name", help="Where to train, e.g. cuda or xpu:1.  [default: the best here]")
@click.option("--dtype", "dtype_name", help="The lower precision.  [default: the device's own]")
@click.option("--epochs", type=click.IntRange(min=1), default=10, show_default=True, help="Passes over the data.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    default=Path("mpamp-demo.png"),
    show_default=True,
    help="Where the picture of both loss curves goes (PNG).",
)
def demo(device_name: str | None, dtype_name: str | None, epochs: int, out: Path) -> None:
    """Train a small CNN twice, in float32 and in mixed precision.

    The data are scikit-learn's digits, 1,797 scans of handwriting. Both runs start from the same weights and
    see the same batches.
    """
    try:
        from mpamp.cli import demo_plot, demo_training
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in {"sklearn", "matplotlib"}:
            raise
        raise click.ClickException(
            f"the demo needs {package}, which is not installed: pip install 'mpamp[demo]'"
        ) from error

    if not out.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {str(out.parent)!r}", param_hint="--out")
    device = pick_device(device_name)
    dtype = _lower_precision_dtype(device, dtype_name)
    console = Console()
    if device_state(device.type).backend.is_emulated(dtype):
        console.print(
            f"This {device.type} has no units for {_name(dtype)}: lower precision is emulated, "
            "and the mixed-precision run will be slower than float32.",
            style="yellow",
        )
    digits = demo_training.load_digits(device)
    steps = epochs * digits.steps_per_epoch
    runs = []
    with Progress(console=console, transient=True) as progress:
        for precision in (None, dtype):
            name = "float32" if precision is None else f"mixed {_name(precision)}"
            task = progress.add_task(name, total=steps)
            on_step = partial(progress.advance, task)
            runs.append(demo_training.train(name, digits, precision, epochs, on_step))
    console.print(_table(runs, f"{epochs} epochs of {steps // epochs} steps on {device}"))
    demo_plot.save(runs, out)
    console.print(f"Loss curves: {out}", soft_wrap=True)


def _lower_precision_dtype(device: torch.device, name: str | None) -> torch.dtype:
    backend = device_state(device.type).backend
    if name is None:
        return backend.default_dtype
    allowed = {_name(dtype): dtype for dtype in backend.lower_precision_dtypes}
    plain_name = name.removeprefix("torch.")
    try:
        return allowed[_SHORT_DTYPE_NAMES.get(plain_name, plain_name)]
    except KeyError:
        raise click.BadParameter(
            f"{name!r} is not a lower precision of {device.type}, which has: {', '.join(sorted(allowed))}",
            param_hint="--dtype",
        ) from None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _table(runs: list[TrainingRun], title: str) -> Table:
    table = Table(title=title)
    table.add_column("run", no_wrap=True)
    for heading in ("test accuracy", "final loss", "ms per step", "weight casts per step", "loss scale"):
        table.add_column(heading, justify="right")
    for run in runs:
        table.add_row(
            run.name,
            f"{run.accuracy:.4f}",
            f"{run.final_loss:.4f}",
            f"{run.ms_per_step:.2f}",
            str(run.weight_casts_per_step),
            f"{run.loss_scales[-1]:g}" if run.loss_scales else "none",
        )
    return table
