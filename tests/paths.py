"""Where a child process of a test looks for modules."""

from __future__ import annotations

import os
from pathlib import Path


def search_path(*folders: Path | str) -> str:
    """Return a PYTHONPATH with ``folders`` first, then what this process was given: torch itself may lie there."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
