"""What this process has installed, told to the Python processes that it starts: by their environment.

A folder with a ``sitecustomize`` of ours goes in front of ``PYTHONPATH``. In a child it looks for the one that it
hides and runs that too, and calls what is announced when the child has imported torch: one that doesn't pays nothing.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from .locks import Rank, made

__all__ = ["VARIABLE", "announce", "withdraw"]

VARIABLE = "MPAMP_CHILDREN"
"""The environment variable that says what a child is to call, as JSON: functions, and the arguments of each."""
SITE = str(Path(__file__).resolve().parent / "childsite")
_lock = made(Rank.PART)


def announce(function: str, **arguments: Any) -> None:
    """Have Python processes that are started from now on call a function once they have imported torch.

    Args:
        function: As ``"package.module:function"``. Announced again it is called once, with the later arguments.
        arguments: What it is called with; as JSON has it.

    Example:
        >>> announce("mpamp.standins:install")
        >>> withdraw("mpamp.standins:install")
        >>> VARIABLE in os.environ
        False
    """
    with _lock:
        _write({**_read(), function: arguments})


def withdraw(function: str) -> None:
    """Have them call it no more; nothing if it isn't announced."""
    with _lock:
        calls = _read()
        if calls.pop(function, None) is not None:
            _write(calls)


def _read() -> dict[str, Any]:
    text = os.environ.get(VARIABLE)
    return json.loads(text)["calls"] if text else {}


def _write(calls: dict[str, Any]) -> None:
    given = os.environ.get("PYTHONPATH")
    paths = [path for path in (given or "").split(os.pathsep) if path != SITE] if given else []
    if calls:
        root = str(Path(__file__).resolve().parents[1])
        os.environ[VARIABLE] = json.dumps({"calls": calls, "root": root, "prefix": sys.prefix})
        paths.insert(0, SITE)
    else:
        os.environ.pop(VARIABLE, None)
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    else:
        os.environ.pop("PYTHONPATH", None)
