"""The page of a report: whole, escaped, alone, small and, in a browser, at work."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import mpamp
from mpamp.insight import reporting
from mpamp.insight.records import OpUse, Summary, short_name
from mpamp.insight.report.charts import by_module, scale_line, shares
from mpamp.insight.report.report import Comparison, Report
from mpamp.insight.report.scaling import ScaleLog

from .reported import Page, train

jinja2 = pytest.importorskip("jinja2")
from mpamp.insight.report.rendering import render, rows_as_json  # noqa: E402

EVIL = "</script><img src=x onerror=alert(1)>&\"'"


def use(module: str = "a", op: str = "aten::linear", **more: Any) -> OpUse:
    values: dict[str, Any] = {
        "op": op,
        "module": module,
        "phase": "forward",
        "device": "cpu",
        "region": "bfloat16",
        "policy": "lower_precision_fp",
        "rule": "native",
        "dtypes_in": ("float32", "float32"),
        "dtypes_out": ("bfloat16",),
        "calls": 1,
        "casts": 2,
        "kept_used": 0,
        "cast_bytes": 600,
        "host_us": 10.0,
        "cast_us": 1.0,
        **more,
    }
    return OpUse(**values)


@pytest.fixture(scope="module")
def trained() -> Report:
    measured = {"seconds": 2.0, "steps": 6, "step_ms": 30.0, "memory": {"process": 2**28}}
    collecting = reporting(None, "train.py --lr 1")
    collecting.compare = lambda: Comparison("float32", measured, {**measured, "step_ms": 40.0})
    with collecting:
        train()
    assert collecting.report is not None
    collecting.report.add_section("Attention", "of a plugin", [("op", "calls"), ("fru", "3")])
    return collecting.report


@pytest.fixture(scope="module")
def large(trained: Report) -> Report:
    """Return a report of a model of 1,000 modules with six rows each."""
    parts = ("attn.q", "attn.k", "attn.v", "mlp.up", "mlp.down")
    names = [f"decoder.layers.{layer}.{part}" for layer in range(200) for part in parts]
    ops = ("aten::linear", "aten::add.Tensor", "aten::gelu")
    uses = tuple(use(name, op, phase=phase) for name in names for op in ops for phase in ("forward", "backward"))
    return Report(
        script="large.py",
        outcome=trained.outcome,
        clock=trained.clock,
        machine=trained.machine,
        tables=trained.tables,
        summary=Summary(uses, (), ()),
        scalers=[],
        steps=trained.steps,
    )


def test_it_says_what_the_report_holds(trained: Report) -> None:
    page = Page(render(trained))
    for words in (
        "train.py --lr 1",
        "The script ran to its end",
        "3 steps skipped",
        "mpamp.scaler.scaler.GradScaler: 6 attempts to step, 3 skipped",
        "of 6 steps looked at overflowed",
        "nothing: so the scaler found its first scale",
        "Beside float32",
        "30 ms",
        "40 ms",
        "256.0 MiB",
        trained.machine["torch"],
        trained.tables[0]["fingerprint"],
        "Attention",
        "of a plugin",
    ):
        assert words in page.text
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a"]
    ids = {attrs["id"] for _, attrs in page.tags if "id" in attrs}
    assert {str(link).removeprefix("#") for link in links} <= ids
    assert len(links) == 8


def test_it_needs_no_other_file_and_no_network(trained: Report) -> None:
    text = render(trained)
    for tag, attrs in Page(text).tags:
        assert tag not in ("link", "img", "iframe", "object", "base")
        assert not {"src", "srcset", "action", "onclick"} & attrs.keys()
        assert str(attrs.get("href", "#")).startswith("#")
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttp", text)


def test_the_trees_rows_are_the_uses(trained: Report) -> None:
    data = Page(render(trained)).rows
    rows = [(data["texts"][row[0]], data["texts"][row[1]], *row[7:11]) for row in data["rows"]]
    uses = trained.summary.uses
    assert rows == [(u.module, short_name(u.op), u.calls, u.casts, u.kept_used, u.cast_bytes) for u in uses]


def test_names_are_escaped_wherever_they_are(trained: Report) -> None:
    with pytest.raises(RuntimeError), (collecting := reporting(None, EVIL)):
        raise RuntimeError(EVIL)
    report = collecting.report
    assert report is not None
    report.summary = Summary((use(EVIL, EVIL, rule=EVIL),), (), (EVIL,))
    report.tables = [{**trained.tables[0], "own": [{"op": EVIL, "policy": EVIL, "source": EVIL}]}]
    report.left_out = [EVIL]
    report.add_section(EVIL, EVIL, [(EVIL,), (EVIL,)])
    text = render(report)
    page = Page(text)  # fails where a tag is opened or closed that shouldn't be
    assert "<img" not in text
    assert EVIL in page.text
    assert EVIL in page.rows["texts"]


def test_a_large_model_makes_a_small_page(large: Report) -> None:
    text = render(large)
    assert len(large.summary.uses) == 6000
    assert len(text.encode()) < 600_000
    page = Page(text)
    assert len(page.rows["rows"]) == 6000
    assert len(page.tags) < 400  # the tree is made when it is opened
    assert {f"decoder.layers.{i}.attn.q" for i in range(200)} <= set(page.rows["texts"])


def test_a_report_without_anything_is_whole() -> None:
    with reporting(None) as collecting:
        pass
    assert collecting.report is not None
    page = Page(render(collecting.report))
    assert "No op ran in a region of mpamp's." in page.text
    assert "No gradient scaler stepped." in page.text
    assert "No step was looked at" in page.text
    assert page.rows == {}


def test_writing_it_needs_jinja2_and_says_so_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "jinja2" else find(name, *a))
    with pytest.raises(mpamp.MpampError, match=r"pip install 'mpamp\[report\]'"):
        reporting("report.html")
    assert reporting(None).report is None


# -- Pictures ------------------------------------------------------------------------------------------


def test_bars_go_as_deep_as_a_dozen_of_them_go() -> None:
    few = [use(f"layers.{layer}.{part}") for layer in range(3) for part in ("q", "k")]
    assert [(bar.name, bar.percent) for bar in by_module(few)] == [(u.module, 100.0) for u in few]
    more = [use(f"layers.{layer}.{part}") for layer in range(12) for part in ("q", "k")]
    assert [bar.name for bar in by_module(more)] == [f"layers.{layer}" for layer in range(12)]
    most = [use(f"layers.{layer}.q") for layer in range(13)]
    assert [(bar.name, bar.value) for bar in by_module([*most, use("")])] == [
        ("layers", "7.6 KiB"),
        ("(outside)", "600 B"),
    ]
    wide = [use(f"part{number:02}", cast_bytes=number) for number in range(1, 15)]
    assert [(bar.name, bar.value, bar.kind) for bar in by_module(wide)][-2:] == [
        ("part03", "3 B", ""),
        ("2 others", "3 B", "rest"),
    ]


def test_dtypes_are_shares_of_what_ran() -> None:
    uses = [use(calls=3), use(calls=1, dtypes_out=("float32",)), use(calls=9, phase="compiled"), use(dtypes_out=())]
    assert shares(uses, lambda u: u.calls) == [("bfloat16", 75.0), ("float32", 25.0)]


def test_a_scale_is_a_line_in_powers_of_two_with_its_skips() -> None:
    log = ScaleLog("any")
    for scale, skipped in ((4.0, True), (2.0, False), (2.0, False), (4.0, False), (4.0, False)):
        log.add(scale, skipped)
    line = scale_line(log)
    assert line.path == "M0.00 25.00H25.00V75.00H75.00V25.00H100"
    assert [(mark.x, mark.y, mark.text) for mark in line.marks] == [(0.0, 25.0, "attempt 1 skipped at 4")]
    assert line.y_ticks == ((75.0, "2"), (25.0, "4"))
    assert line.x_ticks == ((0.0, "1"), (25.0, "2"), (50.0, "3"), (75.0, "4"), (100.0, "5"))


@pytest.mark.parametrize(("attempts", "named"), [(2, [1, 2]), (8, [1, 3, 5, 7]), (1000, [1, 251, 501, 751])])
def test_attempts_are_named_at_even_distances(attempts: int, named: list[int]) -> None:
    log = ScaleLog("any")
    for _ in range(attempts):
        log.add(1.0, False)
    places, names = zip(*scale_line(log).x_ticks, strict=True)
    assert list(map(int, names)) == named
    assert all(place == pytest.approx(100 * (n - 1) / (attempts - 1)) for place, n in zip(places, named, strict=True))


def test_one_attempt_at_any_scale_is_drawn() -> None:
    for scale in (65536.0, 0.0, float("inf"), 2.0**-20):
        log = ScaleLog("any")
        log.add(scale, True)
        line = scale_line(log)
        assert line.x_ticks == ((0.0, "1"),)
        assert all(0 <= place <= 100 for mark in line.marks for place in (mark.x, mark.y))


def test_json_in_a_script_can_not_end_it() -> None:
    text = rows_as_json((use(EVIL),))
    assert not set("<>&") & set(text)
    assert json.loads(text)["texts"][0] == EVIL


# -- In a browser --------------------------------------------------------------------------------------

_PROGRAM = """
<script>
const heard = [];
window.addEventListener("error", event => heard.push(String(event.message)));
window.addEventListener("load", async () => {
  const wait = () => new Promise(done => setTimeout(done, 150));
  const tree = document.getElementById("tree"), field = document.getElementById("search");
  const rows = () => tree.querySelectorAll(".row").length - 1;
  const search = async text => { field.value = text; field.dispatchEvent(new Event("input")); await wait();
    return [document.getElementById("count").textContent, rows()]; };
  const button = name => [...tree.querySelectorAll("button")].find(b => b.textContent === name);
  const found = {at_first: rows(), nodes: document.querySelectorAll("*").length};
  found.opened_by_itself = !!button("layers");
  button("layers").click(); found.layers = rows();
  button("7").click(); button("attn").click(); button("q").click(); found.opened = rows();
  found.first_op = tree.querySelector("small").textContent;
  button("layers").click(); found.closed = rows();
  found.all = await search("");
  found.one = await search("layers.7.attn.q  linear BACKWARD");
  found.many = await search("gelu");
  tree.querySelector("button.more").click(); found.more = rows();
  found.none = await search("nonesuch");
  found.wide = document.documentElement.scrollWidth <= window.innerWidth;
  found.dark = getComputedStyle(document.body).backgroundColor;
  found.heard = heard;
  found.asked = performance.getEntriesByType("resource").length;
  document.documentElement.innerHTML = "<body><pre>" + JSON.stringify(found) + "</pre></body>";
});
</script>
"""


def browse(page: str, program: str, folder: Path, *options: str) -> dict[str, Any]:
    """Open a page in a browser without a window, run a program in it, and return what that found."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")
    browser = next((path for name in names if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip("there is no Chromium or Chrome on this machine")
    file = folder / "page.html"
    file.write_text(page.replace("<style>", f"{program}<style>", 1), encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += ["--virtual-time-budget=20000", "--dump-dom", *options, file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r"<pre>(.*)</pre>", done.stdout, flags=re.S)
    assert found is not None, done.stderr[-2000:]
    return json.loads(found[1].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("scheme", "background", "size"),
    [("1", "rgb(245, 246, 248)", "1400,900"), ("0", "rgb(17, 20, 24)", "500,900")],
    ids=["light and wide", "dark and narrow"],
)
def test_a_browser_shows_it_and_its_tree_is_opened_and_searched(
    large: Report, tmp_path: Path, scheme: str, background: str, size: str
) -> None:
    found = browse(
        render(large), _PROGRAM, tmp_path, f"--blink-settings=preferredColorScheme={scheme}", f"--window-size={size}"
    )
    assert found["heard"] == []
    assert found["asked"] == 0
    assert found["at_first"] == 2  # decoder, which is opened by itself since it is alone, and what is in it
    assert found["opened_by_itself"] is True
    assert found["nodes"] < 600
    assert found["layers"] == 2 + 100  # of 200: the others are asked for
    assert found["opened"] == 2 + 100 + 2 + 3 + 6
    assert found["first_op"] == "lower_precision_fp (native) fp32x2 → bf16"
    assert found["closed"] == 2
    assert found["all"] == ["6,000 rows", 2]
    assert found["one"] == ["1 of 6,000 rows", 1]
    assert found["many"] == ["2,000 of 6,000 rows", 100]
    assert found["more"] == 200
    assert found["none"] == ["0 of 6,000 rows", 0]
    assert found["wide"] is True
    assert found["dark"] == background


def test_a_browser_shows_what_was_trained(trained: Report, tmp_path: Path) -> None:
    program = _PROGRAM[: _PROGRAM.index("  const wait")] + (
        "  const parts = document.querySelectorAll('section, .tile, .bar, .chart b');\n"
        "  const boxes = [...parts].map(part => part.getBoundingClientRect());\n"
        "  const line = document.querySelector('.chart path').getBoundingClientRect();\n"
        "  const found = {empty: boxes.filter(b => !b.width || !b.height).length, boxes: boxes.length, heard,"
        "    skips: document.querySelectorAll('.chart b').length, line: [line.width > 200, line.height > 50],"
        "    out: boxes.filter(b => b.left < 0 || b.right > window.innerWidth + 1).length};\n"
        "  document.documentElement.innerHTML = '<body><pre>' + JSON.stringify(found) + '</pre></body>';\n});</script>"
    )
    found = browse(render(trained), program, tmp_path)
    assert found["heard"] == []
    assert found["skips"] == 3
    assert found["line"] == [True, True]
    assert (found["empty"], found["out"]) == (0, 0)
    assert found["boxes"] > 20
