"""Says at the end how many rows of torch's tables were compared."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch


def pytest_terminal_summary(terminalreporter: Any) -> None:
    compared: Counter[str] = Counter()
    calls = differ = 0
    for report in (*terminalreporter.stats.get("passed", ()), *terminalreporter.stats.get("failed", ())):
        if isinstance(report, pytest.TestReport) and report.when == "call":
            for place, count, is_different in (v for k, v in report.user_properties if k == "parity"):
                compared[place] += 1
                calls += count
                differ += is_different
    if compared:
        places = ", ".join(f"{place} {count}" for place, count in compared.items())
        terminalreporter.section(f"parity with torch {torch.__version__}")
        terminalreporter.write_line(
            f"{compared.total()} rows compared ({places}) in {calls} calls; "
            f"{differ} rows differ by design in some form (docs/differences.md)"
        )
