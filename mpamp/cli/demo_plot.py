"""The picture that ``mpamp demo`` writes. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from mpamp.cli.demo_training import TrainingRun

__all__ = ["save"]


def save(runs: Sequence[TrainingRun], path: Path) -> None:
    """Draw the loss curves of some runs, with their loss scales on a second axis, and write them as PNG.

    A ``Figure`` made without pyplot needs no display and leaves no global state.

    Args:
        runs: The runs, each a curve.
        path: The file to write; an old one is replaced.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    loss_axis = figure.add_subplot(xlabel="step", ylabel="training loss", yscale="log")
    for run in runs:
        loss_axis.plot(run.losses, label=run.name, linewidth=1)
    if any(run.loss_scales for run in runs):
        scale_axis = loss_axis.twinx()
        scale_axis.set_ylabel("loss scale")
        scale_axis.set_yscale("log", base=2)
        for run in runs:
            if run.loss_scales:
                scale_axis.plot(run.loss_scales, color="gray", linestyle=":", label=f"loss scale, {run.name}")
    figure.legend(loc="outside upper center", ncols=3)
    figure.savefig(path, format="png", dpi=120)
