"""A trace as a picture."""

from __future__ import annotations

from typing import Any

from .records import Summary, short_name

__all__ = ["draw"]


def draw(summary: Summary, ax: Any, top: int) -> Any:
    """Draw the bytes that casts moved, by op, and return the axes."""
    if ax is None:
        from matplotlib.figure import Figure

        ax = Figure(layout="constrained").subplots()
    moved: dict[str, int] = {}
    for use in summary.uses:
        moved[short_name(use.op)] = moved.get(short_name(use.op), 0) + use.cast_bytes
    most = sorted(((number, op) for op, number in moved.items() if number), reverse=True)[:top][::-1]
    ax.barh([op for _, op in most], [number / 2**20 for number, _ in most])
    ax.set_xlabel("moved by casts (MiB)")
    ax.set_title(f"{summary.total('casts')} casts in {summary.total('calls')} calls")
    return ax
