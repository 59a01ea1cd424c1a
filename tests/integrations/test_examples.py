"""The example of each framework trains on digits, in this process: its imports are most of its time."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.integrations.steps import skip_without

FOLDER = Path(__file__).parents[2] / "examples" / "frameworks"


@pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator:UserWarning")
@pytest.mark.parametrize(
    ("example", "module", "options"),
    [
        ("ignite", "ignite.engine", ["--epochs", "3", "--log-dir", "runs"]),
        ("timm", "timm", ["--epochs", "2"]),
        ("mmengine", "mmengine.runner", ["--epochs", "3"]),
        ("transformers", "transformers.trainer", ["--cpu", "--epochs", "2"]),
    ],
)
def test_it_learns(
    example: str,
    module: str,
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    skip_without(module, *(["tensorboard"] if "--log-dir" in options else []))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{example}_digits.py", *options])
    runpy.run_path(str(FOLDER / f"{example}_digits.py"), run_name="__main__")
    printed = capsys.readouterr().out
    accuracy = [float(number) for number in re.findall(r"accuracy (\d\.\d+)", printed)]
    assert accuracy[-1] > 0.6, printed
    assert ("--log-dir" not in options) or list((tmp_path / "runs").glob("events*"))
