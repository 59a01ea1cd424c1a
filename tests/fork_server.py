"""Runs Python programs in forks of itself, which have torch imported and nothing of mpamp's: see ``processes``.

It reads requests as lines of JSON, and writes a line for each once it has ended: its exit code.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
import types
import warnings
from typing import Any

import torch  # noqa: F401  # most of what a process's start takes

_GIVEN = {os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path}
_PATHS = [path for path in sys.path[1:] if path not in _GIVEN]
HUNG = "hung"


def main() -> None:
    """Serve until there are no more requests; a fork runs its program and ends as a process that runs it alone."""
    gc.freeze()  # else each fork looks at all that torch has, once more at its end, which takes it a second
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            break
        print(json.dumps(wait(child, request["timeout"])), flush=True)
    else:
        return
    arguments = _become(request)
    _run(arguments)


def wait(child: int, timeout: float) -> int | str:
    """Return a child's exit code; kill it after ``timeout`` seconds, and say that it hung."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return HUNG


def _become(request: dict[str, Any]) -> list[str]:
    """Have this process be what was asked for; return the arguments after those of the interpreter."""
    for number, (file, mode) in enumerate(((os.devnull, "r"), (request["stdout"], "w"), (request["stderr"], "w"))):
        with open(file, mode) as opened:
            os.dup2(opened.fileno(), number)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if sys.dont_write_bytecode:  # not beside the sources: elsewhere, once for all forks
        sys.dont_write_bytecode, sys.pycache_prefix = False, request["bytecode"]
    arguments: list[str] = request["arguments"]
    options = [option for option in os.environ.get("PYTHONWARNINGS", "").split(",") if option]
    while arguments[0] == "-W":
        options.append(arguments[1])
        arguments = arguments[2:]
    sys.warnoptions[:] = options
    warnings._processoptions(options)  # type: ignore[attr-defined]
    return arguments


def _run(arguments: list[str]) -> None:
    kind = arguments[0]
    own = {"-c": "", "-m": os.getcwd()}.get(kind, os.path.dirname(kind))
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [own, *given, *_PATHS]
    importlib.invalidate_caches()
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    if kind == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec", dont_inherit=True), vars(module))
    elif kind == "-m":
        sys.argv[:] = arguments[1:]
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
    else:
        sys.argv[:] = arguments
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    main()
