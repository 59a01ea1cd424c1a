"""The examples for Lightning and Accelerate run, on digits, and so do those in the integrations' docstrings."""

from __future__ import annotations

import doctest
import importlib
import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"
MODULES = ["iteration", "lightning", "pytorch_lightning", "accelerate"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "arguments", "scale"),
    [
        ("lightning", ["--accelerator", "cpu"], "65536"),
        ("fabric", ["--accelerator", "cpu"], "65536"),
        ("accelerate", ["--cpu", "--mixed-precision", "bf16"], "none"),
    ],
)
def test_an_example_learns_digits(
    name: str, arguments: list[str], scale: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip({"fabric": "lightning"}.get(name, name))
    script = EXAMPLES / f"{name}_digits.py"
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        if name == "accelerate":
            state = importlib.import_module("accelerate.state")
            state.AcceleratorState._reset_state(True)
            state.GradientState._reset_state()
    accuracy, found = re.findall(r"accuracy (\d\.\d+)  loss scale (\w+)", capsys.readouterr().out)[-1]
    assert float(accuracy) > 0.88
    assert found == scale


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_run(name: str) -> None:
    """``--doctest-modules`` leaves them out, for their frameworks need not be there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name != "iteration":
            pytest.importorskip(name)
        module = importlib.import_module(f"mpamp.integrations.{name}")
        result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
