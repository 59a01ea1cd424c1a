"""Runs Python programs in fresh processes that cost little: forks of one that has imported torch, and nothing else.

For programs to which mpamp must be new. One that looks at torch's own import, or at how a process is started, is
to be started by ``subprocess``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

_running: list[_Server] = []


class _Server:
    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        command = [sys.executable, str(Path(__file__).with_name("fork_server.py"))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # it is read once, when torch is imported
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, request: Mapping[str, object]) -> int | str:
        """Return the exit code of what was asked for."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        assert line, "the process that forks ended"
        code: int | str = json.loads(line)
        return code

    def stop(self) -> None:
        self.process.communicate()  # it ends where there are no more requests
        self.folder.cleanup()


def python(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | str | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run ``python`` with these arguments: ``-W`` with an action, any number of times, then ``-c``, ``-m`` or a script.

    Raises:
        subprocess.TimeoutExpired: It took more than ``timeout`` seconds, and was killed.
    """
    if not _running:
        _running.append(_Server())
    folder = Path(_running[0].folder.name)
    outputs = [folder / "stdout", folder / "stderr"]
    code = _running[0].ask(
        {
            "arguments": arguments,
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or os.getcwd()),
            "timeout": timeout,
            "stdout": str(outputs[0]),
            "stderr": str(outputs[1]),
            "bytecode": str(folder / "bytecode"),
        }
    )
    if not isinstance(code, int):
        raise subprocess.TimeoutExpired(arguments, timeout)
    return subprocess.CompletedProcess(arguments, code, *(file.read_text(encoding="utf-8") for file in outputs))


def stop() -> None:
    """End the process that forks; another is started where one is needed."""
    while _running:
        _running.pop().stop()
