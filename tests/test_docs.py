"""The docs build without a warning, and are complete and true where that can be checked."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import mpamp
from mpamp import errors
from mpamp.cli.app import app
from mpamp.oplists import families, refused
from mpamp.plugins import hookspecs
from mpamp.rules.eligibility import find_overload, full_name
from mpamp.rules.optable import OpTable
from mpamp.rules.policy import CastPolicy
from tests import processes

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def _page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def generate() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_they_build_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    tables = (tmp_path / "site" / "tables" / "index.html").read_text(encoding="utf-8")
    assert "fft_rfft2" in tables
    assert "<!-- table" not in tables


def test_the_front_page_and_the_navigation_have_each_page_once() -> None:
    pages = [page.name for page in PAGES if page.name != "index.md"]
    assert sorted(re.findall(r"\(([\w-]+\.md)\)", _page("index.md"))) == pages
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    headings, found = zip(*re.findall(r"^ +- \"?(.+?)\"?:(?: (\S+))?$", navigation, flags=re.M), strict=True)
    assert sorted(filter(None, found)) == sorted([*pages, "index.md"])
    assert len(set(headings)) == len(headings)


def test_no_change_is_told_twice() -> None:
    changes = re.findall(r"^- (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)
    assert len(changes) > 40
    assert len(set(changes)) == len(changes)


# -- Hooks ---------------------------------------------------------------------------------------------


def _hooks() -> dict[str, Any]:
    return {name: f for name, f in vars(hookspecs).items() if hasattr(f, "mpamp_spec")}


def test_every_hook_is_there_with_its_exact_arguments() -> None:
    documented = re.findall(r"^## `(\w+)\((.*)\)`$", _page("hooks.md"), flags=re.M)
    actual = {name: ", ".join(inspect.signature(hook).parameters) for name, hook in _hooks().items()}
    assert len(actual) >= 4
    assert dict(documented) == actual
    assert len(documented) == len(actual)


# -- Errors --------------------------------------------------------------------------------------------


def test_every_error_is_there_with_what_it_also_is() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", _page("errors.md"), flags=re.M)
    documented = {name: re.findall(r"`(\w+)`", bases) for name, bases in rows}
    assert set(documented) == set(errors.__all__)
    for name, bases in documented.items():
        actual = [base.__name__ for base in getattr(errors, name).__bases__]
        assert bases == ([b for b in actual if b != "MpampError"] or actual)


# -- Tables --------------------------------------------------------------------------------------------


def test_every_policy_is_explained() -> None:
    section = _page("tables.md").partition("## Policies")[2].partition("## ")[0]
    assert re.findall(r"^\| `(\w+)`", section, flags=re.M) == [policy.value for policy in CastPolicy]


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu"])
def test_a_table_is_generated_with_all_its_rows(device: str, generate: types.ModuleType) -> None:
    text = generate.on_page_markdown(f"before\n<!-- table: default {device} -->\nafter")
    table = OpTable.named("default", device)
    found: dict[str, set[str]] = {}
    for policy, _, ops in re.findall(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", text, flags=re.M):
        for op in re.findall(r"`([^`]+)`", ops):
            found.setdefault(op if "::" in op else f"aten::{op}", set()).add(policy)
    assert found == {op: {p.value for p in row.policies()} for op, row in table.items() if row.policies()}


def test_every_added_row_is_listed(generate: types.ModuleType) -> None:
    """In the file as it is in the repository; another torch than it was written with may lack some of its ops."""
    lines = _page("additions.md").splitlines()
    row = re.compile(r"^\| `([^`]+)` \|")
    here = [line for line in lines if (found := row.match(line)) and find_overload(full_name(found[1])) is not None]
    # The page is written with torch 2.13: tensors had names before, and the others are of 2.14.
    unwritten = re.compile("imname|names_|^linalg_matrix_sqrth$|^linalg_polar$")
    generated = {found[1]: line for line in generate.additions().splitlines() if (found := row.match(line))}
    written = [line for name, line in generated.items() if not unwritten.search(name)]
    assert here == written, "run python docs/generate.py"
    if torch.__version__.startswith("2.13"):
        assert _page("additions.md") == generate.additions(), "run python docs/generate.py"
    for device in generate.DEVICES:
        added = [d for d in OpTable.named("native", device).diff(OpTable.named("default", device)) if d.left is None]
        assert len(added) > 100
        names = {name for d in added if not unwritten.search(name := d.op.removeprefix("aten::"))}
        assert all(any(line.startswith(f"| `{name}` |") for line in here) for name in names)


def test_every_family_is_generated_with_all_its_ops(generate: types.ModuleType) -> None:
    assert "<!-- families: -->" in _page("tables.md")
    text = generate.on_page_markdown("<!-- families: -->")
    rows = re.findall(r"^\| `@(\w+)` \| (.+) \|$", text, flags=re.M)
    assert {name: re.findall(r"`([^`]+)`", ops) for name, ops in rows} == families()


def test_every_device_has_its_table_and_difference(generate: types.ModuleType) -> None:
    page = _page("tables.md")
    for device in generate.DEVICES:
        assert f"<!-- table: default {device} -->" in page
        assert f"<!-- diff: {device} native default -->" in page
    filled = generate.on_page_markdown(page)
    assert "<!--" not in filled
    assert "| banned | fp32 | `binary_cross_entropy` |" in filled


# -- The command ---------------------------------------------------------------------------------------


def test_every_command_is_there_with_its_options() -> None:
    page = _page("command.md")
    for name, command in app.commands.items():
        assert f"| `mpamp {name}" in page
        if name in ("doctor", "plugins", "ops"):
            options = [p.opts[0] for p in command.params if isinstance(p, click.Option)]
            line = next(line for line in page.splitlines() if line.startswith(f"| `mpamp {name}"))
            assert sorted(re.findall(r"--\w+", line)) == sorted(options)


# -- Words and code ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page",
    [
        "quick-start.md",
        "regions.md",
        "module_rules.md",
        "tables.md",
        "op-pack.md",
        "overflow.md",
        "search.md",
        "coming-from-torch-amp.md",
        "coming-from-ipex.md",
    ],
)
def test_its_python_runs(page: str) -> None:
    blocks = _blocks(page)
    names: dict[str, Any] = {"__name__": "docs"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for block in blocks:
            exec(compile(block, page, "exec"), names)


def _blocks(page: str) -> list[str]:
    blocks = re.findall(r"^```python\n(.+?)^```$", _page(page), flags=re.M | re.S)
    assert blocks
    return blocks


def test_the_backends_python_runs() -> None:
    """In a process of its own: it names a device to torch."""
    code = "\n".join(_blocks("backend-plugin.md"))
    done = processes.python("-W", "error", "-c", code, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert ", 0 failed" in done.stdout


def test_names_of_mpamp_are_mpamps() -> None:
    for page in PAGES:
        for name in re.findall(r"\bmpamp\.([a-zA-Z_]\w*)\b(?!\.toml)", page.read_text(encoding="utf-8")):
            found = hasattr(mpamp, name) or importlib.util.find_spec(f"mpamp.{name}") is not None
            assert found, f"{page.name}: mpamp.{name}"


def test_files_that_are_named_exist() -> None:
    named = {
        n for p in PAGES for n in re.findall(r"`((?:examples|tests|mpamp)/[\w./-]+)`", p.read_text(encoding="utf-8"))
    }
    assert len(named) >= 4
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_path_or_host_of_one_machine(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"(?<![\w.])/(?:work|home|root|tmp|opt|usr)\b|localhost|\b\d+\.\d+\.\d+\.\d+\b", text)
    assert not re.findall(r"pypi\.|index-url|\bwhl\b", text)


def test_every_refused_op_is_documented(generate: types.ModuleType) -> None:
    filled = generate.on_page_markdown(_page("rules.md"))
    assert "<!--" not in filled
    for op, why in refused().items():
        (line,) = [line for line in filled.splitlines() if f"`{op.removeprefix('aten::')}`" in line and why in line]
        assert line.startswith("|")


def test_every_policys_ops_are_counted(generate: types.ModuleType) -> None:
    lines = generate.policies().splitlines()[2:]
    counts = {line.split("|")[1].strip(" `"): [int(n) for n in line.split("|")[2:4]] for line in lines}
    assert list(counts) == [p.value for p in CastPolicy]
    assert counts["fp32"][0] > 1000 > counts["fp32_set_opt_dtype"][0] > counts["fp32_append_dtype"][0] > 0
    assert counts["fp32"][1] == 0 < counts["promote"][1]


def test_what_the_page_of_traces_prints_is_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """But for times."""
    page = _page("trace.md")
    names: dict[str, Any] = {"__name__": "docs"}
    for block in re.findall(r"^```python\n(.+?)^```$", page, flags=re.M | re.S):
        exec(compile(block, "trace.md", "exec"), names)
    shown = "\n".join(text.strip() for text in re.findall(r"^```text\n(.+?)^```$", page, flags=re.M | re.S))
    printed = capsys.readouterr().out

    def without_times(text: str) -> list[str]:
        found = [re.sub(r"((?:B|KiB|MiB)) +\d+$", r"\1", line.rstrip()) for line in text.strip().splitlines()]
        return [re.sub(r" {2,}", " ", line) for line in found if "compiled" not in line]

    assert without_times(printed) == without_times(shown)


def test_what_the_page_of_reports_prints_is_what_it_prints(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jinja2")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.+?)^```$", _page("report.md"), flags=re.M | re.S)
    (shown,) = re.findall(r"^```text\n(.+?)^```$", _page("report.md"), flags=re.M | re.S)
    exec(compile(code, "report.md", "exec"), {"__name__": "docs"})
    assert capsys.readouterr().out == shown
    assert "The first 4 steps were lost in finding a scale" in (tmp_path / "report.html").read_text(encoding="utf-8")
