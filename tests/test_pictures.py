"""The walkthroughs of the docs say what their code prints today, but for times; and their pictures can be drawn."""

from __future__ import annotations

import importlib.util
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import mpamp

ROOT = Path(__file__).parents[1]
PAGES = ["nan-loss.md", "slower-than-float32.md", "which-layers.md"]
_TIME = re.compile(r"\b[\d.]+(?:e-\d+)? (s|ms|us)\b")
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def _load() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pictures = _load()


@pytest.fixture(scope="module", params=PAGES)
def page(request: pytest.FixtureRequest) -> tuple[str, str, dict[str, Any]]:
    """Return a page's name, the page as it is when it is run now, and the names that its code left."""
    with torch.random.fork_rng([]):
        text, names = pictures.run(request.param)
    mpamp.clear_cache()
    return request.param, text, names


def _outputs(text: str) -> list[str]:
    return [_TIME.sub(r"TIME \1", found) for found in re.findall(r"^```text\n(.*?)^```$", text, flags=re.M | re.S)]


def test_a_page_has_a_picture_of_its_own() -> None:
    assert list(pictures.PAGES) == PAGES
    for name in PAGES:
        assert f"](pictures/{pictures.picture_of(name).name})" in (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert pictures.picture_of(name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="written with torch 2.13")
def test_the_pages_say_what_is_printed(page: tuple[str, str, dict[str, Any]]) -> None:
    """Every word, and every number to 5 %: processors don't round alike."""
    name, text, _ = page
    written, printed = (_outputs(t) for t in ((ROOT / "docs" / name).read_text(encoding="utf-8"), text))
    assert len(written) >= 5
    again = "run python docs/pictures.py"
    assert [_NUMBER.sub("N", found) for found in written] == [_NUMBER.sub("N", found) for found in printed], again
    for before, after in zip(written, printed, strict=True):
        numbers = ([float(number) for number in _NUMBER.findall(found)] for found in (before, after))
        assert next(numbers) == pytest.approx(next(numbers), rel=0.05), again


def test_a_page_walks_through_all_the_tools(page: tuple[str, str, dict[str, Any]]) -> None:
    code = "\n".join(re.findall(r"^```python\n(.+?)^```$", page[1], flags=re.M | re.S))
    tools = ("find_overflow", "search_precision", "module_rules", "verify_cache")
    assert [tool for tool in tools if f"mpamp.{tool}(" not in code] == []
    assert re.search(r"mpamp\.(explain|trace)\(", code)


def test_the_pictures_show_what_the_code_found(page: tuple[str, str, dict[str, Any]]) -> None:
    pytest.importorskip("matplotlib")
    name, _, names = page
    all_axes = pictures.PAGES[name](names).axes
    if name == "nan-loss.md":
        (axes,) = all_axes
        assert [len(line.get_xdata()) for line in axes.lines] == [12, 12]
        assert [text.get_position()[0] for text in axes.texts] == [4, 8, 12]
    elif name == "slower-than-float32.md":
        widths = [sum(bar.get_width() for bar in axes.patches) * 2**20 for axes in all_axes]
        assert widths == pytest.approx([names["before"].cast_bytes, names["after"].cast_bytes])
        assert widths[1] < widths[0] / 4
    else:
        (axes,) = all_axes
        labels = [label.get_text() for label in axes.get_yticklabels()]
        gains = dict(zip(labels, [bar.get_width() for bar in axes.patches], strict=True))
        assert len(gains) == 13
        assert sorted(gains, key=gains.__getitem__)[-2:] == ["blocks.3.norm", "blocks.3.mix"]


def test_a_block_that_prints_without_saying_so_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "DOCS", tmp_path)
    (tmp_path / "page.md").write_text("```python\nprint(1)\n```\n\n```text\n0\n```\n\n```python\nx = 2\n```\n")
    assert pictures.run("page.md")[0] == "```python\nprint(1)\n```\n\n```text\n1\n```\n\n```python\nx = 2\n```\n"
    (tmp_path / "page.md").write_text("```python\nprint(1)\n```\n")
    with pytest.raises(ValueError, match="a block that prints"):
        pictures.run("page.md")
