"""The page on the scaler: each difference has the test that it names."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "scaler.md").read_text(encoding="utf-8")


def test_each_difference_names_tests_that_exist() -> None:
    defined = {
        name
        for file in [*HERE.glob("test_*.py"), *HERE.with_name("standins").glob("test_*.py")]
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
    }
    rows = [line for line in PAGE.partition("## Where it differs")[2].splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 30
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, row
        assert set(named) <= defined, row
