"""The Python of the frameworks' pages runs, where the frameworks are."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.steps import skip_without

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator:UserWarning")
@pytest.mark.parametrize(
    ("page", "module"),
    [
        ("transformers", "transformers.trainer"),
        ("ignite", "ignite.engine"),
        ("timm", "timm"),
        ("mmengine", "mmengine.optim"),
    ],
)
def test_its_python_runs(page: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without(module)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.+?)^```$", (DOCS / f"{page}.md").read_text(encoding="utf-8"), flags=re.M | re.S)
    assert blocks
    names: dict[str, Any] = {"__name__": "docs"}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    assert any("integrations" in str(getattr(value, "__module__", "")) for value in names.values())


@pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator:UserWarning")
@pytest.mark.parametrize("name", ["ignite", "logging", "mmengine", "timm", "transformers"])
def test_examples_in_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest --doctest-modules leaves the room out, for its frameworks need not be there."""
    skip_without(*(() if name == "logging" else ("transformers.trainer",) if name == "transformers" else (name,)))
    monkeypatch.chdir(tmp_path)
    results = doctest.testmod(importlib.import_module(f"mpamp.integrations.{name}"))
    assert results.attempted >= 3
    assert results.failed == 0
