"""What the options of ``mpamp run`` do to the program, and that a table that can't be used leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import mpamp
import mpamp.apex
from mpamp import children, standins
from mpamp.cli.app import app

SCRIPT = """
import torch, mpamp
weight, seen = torch.nn.Parameter(torch.ones(4, 4)), []
mpamp.clear_cache()
before = mpamp.cache_info().casts
for _ in range(3):
    with torch.autocast("cpu"):
        seen.append(torch.nn.functional.gelu(torch.ones(1, 4) @ weight).dtype)
print(mpamp.cache_info().casts - before, seen[0], isinstance(torch.amp.GradScaler("cpu"), mpamp.GradScaler))
"""


@pytest.fixture(autouse=True)
def _own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    mpamp.uninstall()
    mpamp.apex.uninstall()
    children.withdraw("mpamp.standins.rules:await_device")
    mpamp.set_op_rules("cpu", None)


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    return str(file)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["run", *arguments])


def test_a_program_runs_on_mpamp_by_torchs_names(script: str) -> None:
    assert run(script).output.strip() == "3 torch.bfloat16 True"
    calls = json.loads(os.environ[children.VARIABLE])["calls"]
    assert list(calls) == ["mpamp.standins:install", "mpamp.apex:install"]


def test_persistent_cache(script: str) -> None:
    assert run("--persistent-cache", script).output.strip() == "1 torch.bfloat16 True"
    calls = json.loads(os.environ[children.VARIABLE])["calls"]
    assert calls["mpamp.standins:install"] == {"persistent_cache": True}


@pytest.mark.parametrize("device", ["cpu", "any"])
def test_ops(script: str, tmp_path: Path, device: str) -> None:
    table = tmp_path / "table.toml"
    table.write_text(f'name = "mine"\ndevice = "{device}"\nbase = "default"\n[ops]\ngelu = "fp32"\n')
    if device == "any":
        table.write_text('name = "mine"\n[ops]\ngelu = "fp32"\nmatmul = "lower_precision_fp"\n')
    result = run("--ops", str(table), script)
    assert result.output.strip() == "3 torch.float32 True", result.output
    calls = json.loads(os.environ[children.VARIABLE])["calls"]
    assert calls["mpamp.standins.rules:await_device"] == {"path": str(table)}
    mpamp.set_op_rules("cpu", None)
    standins.use_table(str(table))
    assert str(mpamp.get_op_table("cpu").policy("gelu")) == "fp32"


def test_a_table_that_is_none(script: str, tmp_path: Path) -> None:
    table = tmp_path / "table.toml"
    table.write_text('[ops]\nnonesuch_op = "fp32"\n')
    result = run("--ops", str(table), script)
    assert result.exit_code == 2
    assert "nonesuch_op" in result.output
    assert children.VARIABLE not in os.environ


def test_report(script: str, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    page = tmp_path / "r.html"
    result = run("--report", str(page), script)
    assert result.stdout.strip() == "3 torch.bfloat16 True"
    assert str(page) in result.stderr
    text = page.read_text(encoding="utf-8")
    assert script in text
    assert re.search(r"matmul|linear", text)
