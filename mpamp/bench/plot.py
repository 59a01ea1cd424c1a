"""The pictures: ratios to ``torch.autocast``, and how cost grows. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

__all__ = ["save_growth", "save_ratios"]

Record = dict[str, Any]


def save_ratios(rows: Sequence[Record], path: Path) -> None:
    """Draw the ratio of every row to its base, a group of bars for each workload and mode, and write them as PNG."""
    timed = [row for row in rows if row["ratio"] is not None and row["variant"] != row["base"]]
    groups = list(dict.fromkeys(_group(row) for row in timed))
    series = list(dict.fromkeys(_series(row) for row in timed))
    height = 0.8 / max(1, len(series))
    figure = Figure(figsize=(10, 2 + 0.16 * len(groups) * max(3, len(series))), layout="constrained")
    axis = figure.add_subplot(xlabel="time / torch.autocast's time (below 1 is faster)")
    for number, name in enumerate(series):
        mine = [row for row in timed if _series(row) == name]
        places = [groups.index(_group(row)) + (number - (len(series) - 1) / 2) * height for row in mine]
        axis.barh(places, [row["ratio"] for row in mine], height, label=name)
    axis.axvline(1, color="black", linewidth=1)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_yticks(range(len(groups)), groups)
    axis.invert_yaxis()
    if series:
        figure.legend(loc="outside upper center", ncols=2)
    figure.savefig(path, format="png", dpi=120)


def _group(row: Record) -> str:
    return f"{row['work']}, {row['mode']}"


def _series(row: Record) -> str:
    return f"{row['variant']} ({row['engine']})"


def save_growth(growth: Sequence[Record], path: Path) -> None:
    """Draw time and memory over the number of things, a line for each kind and engine, and write them as PNG."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    times = figure.add_subplot(1, 2, 1, xlabel="n", ylabel="time, us", xscale="log", yscale="log")
    memory = figure.add_subplot(1, 2, 2, xlabel="n", ylabel="host memory held, bytes", xscale="log", yscale="log")
    for each in growth:
        counts = [point["n"] for point in each["points"]]
        label = f"{each['subject']} ({each['engine']}), n^{each['time']['exponent']:.2f}"
        times.plot(counts, [point["us"] for point in each["points"]], marker="o", label=label)
        memory.plot(counts, [max(1, point["bytes"]) for point in each["points"]], marker="o")
    figure.legend(*times.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    figure.savefig(path, format="png", dpi=120)
