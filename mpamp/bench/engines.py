"""Which engines there are, and one process for each: an engine is chosen once per process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from .worker import Settings

__all__ = ["ENGINES", "measure_under", "why_not"]

ENGINES = ("python", "compiled")


def _environ(engine: str) -> dict[str, str]:
    return {**os.environ, "MPAMP_ENGINE": engine}


def why_not(engine: str) -> str | None:
    """Say why an engine doesn't run here, as ``mpamp doctor`` sees it; None if it does."""
    command = [sys.executable, "-m", "mpamp", "doctor", "--json"]
    done = subprocess.run(command, env=_environ(engine), capture_output=True, text=True, check=False)
    try:
        found = json.loads(done.stdout)["engine"]
    except (ValueError, KeyError):
        last = done.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
        return f"mpamp doctor failed: {last[0]}"
    return _reason(engine, found)


def _reason(engine: str, found: Mapping[str, Any] | None) -> str | None:
    name = None if found is None else found["name"]
    if name == engine:
        return None
    why = "" if found is None else found.get("why") or found.get("reason") or ""
    return f"MPAMP_ENGINE={engine} gives the engine {name}" + (f": {why}" if why else "")


def measure_under(engine: str, settings: Settings) -> Iterator[tuple[str, Any]]:
    """Measure in a process of its own, and yield each (kind, result) when it is there.

    Ends with ``("crash", reason)`` where that process did not end well.
    """
    command = [sys.executable, "-m", "mpamp.bench.worker", json.dumps(asdict(settings))]
    with subprocess.Popen(
        command, env=_environ(engine), stdout=subprocess.PIPE, text=True, encoding="utf-8"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield from json.loads(line).items()
    if process.returncode:
        yield "crash", f"the process of the engine {engine} ended with {process.returncode}"
