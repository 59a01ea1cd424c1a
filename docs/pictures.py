"""Runs the pages that walk through a fault, and writes what they print, and their pictures, into them.

On such a page each block of Python is run in turn, and the block of text after it is what it printed. ``python
docs/pictures.py`` writes all of them anew; it needs matplotlib.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
_BLOCK = re.compile(r"^```python\n(?P<code>.+?)^```\n(?:\n```text\n(?P<text>.*?)^```\n)?", flags=re.M | re.S)

Names = dict[str, Any]


def run(page: str) -> tuple[str, Names]:
    """Run a page's blocks; return the page with what they printed, and the names that they left."""
    names: Names = {"__name__": "docs"}
    text = (DOCS / page).read_text(encoding="utf-8")

    def ran(block: re.Match[str]) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(block["code"], page, "exec"), names)
        code = f"```python\n{block['code']}```\n"
        if bool(out.getvalue()) is not (block["text"] is not None):
            raise ValueError(
                f"{page}: a block that prints has a block of text after it, and no other:\n{block['code']}"
            )
        return code if block["text"] is None else f"{code}\n```text\n{out.getvalue()}```\n"

    return _BLOCK.sub(ran, text), names


# -- Pictures ------------------------------------------------------------------------------------------


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _losses(names: Names) -> Any:
    """Draw the loss by step, with a mark where it is NaN."""
    figure = _figure(7, 2.8)
    axes = figure.add_subplot(xlabel="step", ylabel="loss")
    for label, losses in (("softmax in float16", names["losses"]), ("softmax in float32", names["losses_mended"])):
        (line,) = axes.plot(range(1, len(losses) + 1), losses, marker=".", label=label)
        for step in (step for step, loss in enumerate(losses, 1) if loss != loss):
            axes.axvspan(step - 0.5, step + 0.5, color=line.get_color(), alpha=0.2, linewidth=0)
            axes.text(step, axes.get_ylim()[0], "NaN", ha="center", va="bottom", fontsize=8)
    axes.legend(loc="upper right")
    return figure


def _casts(names: Names) -> Any:
    """Draw the bytes that casts move, before and after."""
    figure = _figure(8, 2.6)
    left, right = figure.subplots(1, 2, sharex=True)
    for axes, name, trace in ((left, "before", names["before"]), (right, "after", names["after"])):
        trace.plot(axes)
        axes.set_title(f"{name}: {trace.casts} casts")
    return figure


def _modules(names: Names) -> Any:
    """Draw what the metric gains by each module alone in float32."""
    gains = {name: value - names["found"].lower for name, value in names["alone"].items()}
    figure = _figure(7, 0.9 + 0.22 * len(gains))
    axes = figure.add_subplot(xlabel="accuracy gained by this module alone in float32")
    axes.barh(list(gains), list(gains.values()))
    axes.axvline(0, color="black", linewidth=1)
    axes.invert_yaxis()
    return figure


PAGES: dict[str, Callable[[Names], Any]] = {
    "nan-loss.md": _losses,
    "slower-than-float32.md": _casts,
    "which-layers.md": _modules,
}
"""The pages, and who draws the picture of the same name."""


def picture_of(page: str) -> Path:
    """Return where a page's picture is."""
    return DOCS / "pictures" / f"{Path(page).stem}.png"


if __name__ == "__main__":
    for page, draw in PAGES.items():
        text, names = run(page)
        (DOCS / page).write_text(text, encoding="utf-8")
        picture = picture_of(page)
        picture.parent.mkdir(exist_ok=True)
        draw(names).savefig(picture, dpi=100)
