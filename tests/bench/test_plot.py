"""The pictures are PNG, whatever there is to draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpamp.bench import plot

PNG = b"\x89PNG\r\n\x1a\n"


def _row(variant: str, ratio: float | None) -> dict[str, Any]:
    told = {"work": "mlp", "mode": "eager", "engine": "python", "base": "torch.autocast"}
    return {**told, "variant": variant, "ratio": ratio}


@pytest.mark.parametrize("variants", [["mpamp", "pure"], []])
def test_ratios(variants: list[str], tmp_path: Path) -> None:
    rows = [_row("torch.autocast", 1.0), _row("float32", None), *(_row(v, 0.5) for v in variants)]
    plot.save_ratios(rows, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(PNG)


def test_growth(tmp_path: Path) -> None:
    points = [{"n": n, "us": 2.0 * n, "bytes": 0} for n in (1, 10)]
    found = {"subject": "rules", "engine": "python", "points": points, "time": {"exponent": 1.0}}
    plot.save_growth([found], tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(PNG)
