"""The results of a run, as they come in, and the JSON file that they are kept in."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .engines import measure_under, why_not
from .worker import Settings

__all__ = ["SCHEMA", "Report"]

SCHEMA = 1
"""Raised when a reader of the JSON would have to change."""


@dataclass
class Report:
    """What was measured.

    Attributes:
        settings: What was asked for.
        engines: By engine, ``status`` (``ran``, ``skipped`` or ``failed``), ``reason`` and ``environment``.
        rows: The rows of micro, infer and train, as ``mpamp.bench.rows.Row`` has them, with ``engine`` and ``verdict``.
        growth: The growths, as ``mpamp.bench.growth.Growth`` has them, with ``engine``.
        memory_over_regions: By engine, the memory after a few regions and after many.
    """

    settings: Settings
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    growth: list[dict[str, Any]] = field(default_factory=list)
    memory_over_regions: dict[str, dict[str, Any]] = field(default_factory=dict)

    def measure(self, engine: str, path: Path) -> None:
        """Measure under an engine, if it runs here; the file is written anew with each result."""
        reason = why_not(engine)
        status = {"status": "ran" if reason is None else "skipped", "reason": reason, "environment": None}
        self.engines[engine] = status
        self.write(path)
        for kind, result in () if reason is not None else measure_under(engine, self.settings):
            if kind == "crash":
                status.update(status="failed", reason=result)
            elif kind == "environment":
                status[kind] = result
            elif kind == "memory_over_regions":
                self.memory_over_regions[engine] = result
            else:
                (self.rows if kind == "row" else self.growth).append({"engine": engine, **result})
            self.write(path)

    def write(self, path: Path) -> None:
        """Write all of it as JSON."""
        data = {"benchmark": "mpamp bench", "schema": SCHEMA, **asdict(self)}
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    @property
    def problems(self) -> list[str]:
        """Say what failed that shouldn't: an engine's process, or mpamp where it ran. Not what torch can't."""
        crashed = [f"{engine}: {s['reason']}" for engine, s in self.engines.items() if s["status"] == "failed"]
        failed = [r for r in self.rows if r["status"] == "failed" and r["variant"].startswith("mpamp")]
        return crashed + [f"{r['engine']}: {r['work']}, {r['mode']}, {r['variant']}: {r['reason']}" for r in failed]
