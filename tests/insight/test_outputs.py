"""A trace as text, as a table of rich, as JSON, as a page and as a picture; and what differs between two."""

from __future__ import annotations

import io
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import mpamp
from mpamp.insight.text import COLUMNS
from mpamp.insight.tracing import Trace

from .models import RULES, Faulty

BRAIN = torch.bfloat16
EVIL = "</td><script>alert(1)</script>"


@pytest.fixture(scope="module")
def seen() -> Trace:
    torch.manual_seed(0)
    with mpamp.autocast("cpu", BRAIN, ops=RULES):
        return mpamp.explain(Faulty(), torch.randn(32, 64))


class _Page(HTMLParser):
    """What a page holds: its cells, its scripts, and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.scripts = 0
        self.loaded: list[str] = []
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_cell = tag == "td"
        self.scripts += tag == "script"
        self.loaded += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
        elif tag == "td":
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = False

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.rows[-1][-1] += data


def test_text_has_the_sums_the_uses_and_the_findings(seen: Trace) -> None:
    lines = str(seen).splitlines()
    assert lines[0] == "12 calls of ops, 11 casts of 109.1 KiB, 0 kept casts used, 5 findings"
    assert lines[2].split() == " ".join(COLUMNS).split()
    assert " ".join(lines[3].split()[:-1]) == "first linear lower_precision_fp native fp32x3 bf16 1 3 0 36.4 KiB"
    assert sum(line.startswith("* ") for line in lines) == 5 + len(seen.unseen)
    assert repr(seen) == "<Trace: 12 calls, 11 casts, 5 findings>"


def test_a_trace_of_nothing_says_so() -> None:
    text = str(mpamp.trace())
    assert text.startswith("0 calls of ops, 0 casts of 0 B")
    assert "Findings:\n* nothing" in text


def test_rich_prints_it(seen: Trace) -> None:
    rich = pytest.importorskip("rich.console")
    console = rich.Console(file=io.StringIO(), width=200)
    console.print(seen)
    text = console.file.getvalue()
    assert "109.1 KiB" in text
    assert "round trip" in text
    assert text.count("layer_norm") >= 3


def test_json_has_it_all(seen: Trace, tmp_path: Path) -> None:
    text = seen.to_json(tmp_path / "trace.json")
    data = json.loads((tmp_path / "trace.json").read_text())
    assert json.loads(text) == data == seen.to_dict()
    assert data["totals"] == {"calls": 12, "casts": 11, "kept_used": 0, "cast_bytes": seen.cast_bytes}
    assert [use["op"] for use in data["uses"]] == [use.op for use in seen.uses]
    assert [finding["kind"] for finding in data["findings"]] == [finding.kind for finding in seen.findings]
    assert data["tables"]["cpu"]["fingerprint"] == mpamp.get_op_table("cpu").fingerprint


def test_the_page_has_a_row_for_each_use_and_loads_nothing(seen: Trace, tmp_path: Path) -> None:
    text = seen.to_html(tmp_path / "trace.html")
    assert (tmp_path / "trace.html").read_text(encoding="utf-8") == text
    page = _Page(text)
    cells = [row for row in page.rows if row]
    assert [(row[0], row[1], int(row[6]), int(row[7])) for row in cells] == [
        (use.module, use.op.removeprefix("aten::").partition(".")[0], use.calls, use.casts) for use in seen.uses
    ]
    assert (page.scripts, page.loaded) == (1, [])
    assert "http" not in text
    assert "@import" not in text
    assert "url(" not in text


def test_a_notebook_gets_a_part_of_a_page(seen: Trace) -> None:
    page = _Page(seen._repr_html_())
    assert len([row for row in page.rows if row]) == len(seen.uses)
    assert page.scripts == 0


def test_names_are_escaped() -> None:
    evil = type(EVIL, (nn.Module,), {"forward": lambda self, x: torch.mm(x, self.weight)})()
    evil.weight = torch.ones(64, 64)
    with mpamp.autocast("cpu", BRAIN):
        found = mpamp.explain(evil, torch.ones(64, 64))
    assert found.findings
    for text in (found.to_html(), found._repr_html_()):
        assert EVIL not in text
        assert [row[0] for row in _Page(text).rows if row] == [EVIL]


def test_the_picture_has_a_bar_for_each_op_that_casts(seen: Trace) -> None:
    pytest.importorskip("matplotlib")
    axes = seen.plot()
    widths = {
        label.get_text(): bar.get_width() for label, bar in zip(axes.get_yticklabels(), axes.patches, strict=True)
    }
    assert set(widths) == {"linear", "layer_norm"}
    assert sum(widths.values()) * 2**20 == pytest.approx(seen.cast_bytes)
    assert seen.plot(axes) is axes


def test_two_traces_differ_where_a_rule_does(seen: Trace) -> None:
    torch.manual_seed(0)
    with mpamp.autocast("cpu", BRAIN):
        other = mpamp.explain(Faulty(), torch.randn(32, 64))
    found = seen.diff(other)
    assert [(c.module, c.op) for c in found.changes] == [
        ("norm", "aten::layer_norm"),
        ("Faulty", "aten::relu"),
        ("second", "aten::linear"),
    ]
    norm = found.changes[0]
    assert (norm.before.policies, norm.before.dtypes_out, norm.before.casts) == (("fp32",), ("float32",), 1)
    assert (norm.after.policies, norm.after.dtypes_out, norm.after.casts) == (("",), ("bfloat16",), 0)
    assert (found.casts, found.cast_bytes) == (-2, other.cast_bytes - seen.cast_bytes)
    assert "norm: layer_norm: fp32 -> float32, 1 calls, 1 casts => not listed -> bfloat16" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["changes"][0]["module"] == "norm"
    assert not seen.diff(seen)
    assert not other.diff(other).changes


def test_what_one_trace_lacks_is_told() -> None:
    first, second = (
        mpamp.explain(nn.Sequential(layer), torch.ones(64, 64)) for layer in (nn.Linear(64, 64), nn.ReLU())
    )
    assert [line.strip().split(":")[:3] for line in str(first.diff(second)).splitlines()[1:]] == [
        ["0", " linear", " only before"],
        ["0", " relu", " only after"],
    ]
