"""``python -m apex.parallel.multiproc script.py ARGS``: the script once for each accelerator of this machine.

Every process gets ``--world-size N --rank I`` behind its arguments, as from apex's, and torchrun's variables in its
environment. Processes but the first write to ``GPU_I.log``. Without an accelerator ``--world-size`` says how many.
torchrun is what to use instead.
"""

import os
import subprocess
import sys

import torch

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Run the processes; return the first exit code that isn't 0."""
    asked = _after(arguments, "--world-size")
    size = torch.accelerator.device_count() or int(asked or 1)
    workers = []
    for rank in range(size):
        command = _with(_with(arguments, "--world-size", size), "--rank", rank)
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            **os.environ,
            "WORLD_SIZE": str(size),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
        }
        log = open(f"GPU_{rank}.log", "w", encoding="utf-8") if rank else None  # noqa: SIM115
        try:
            workers.append(subprocess.Popen([sys.executable, *command], stdout=log, env=environment))
        finally:
            if log is not None:
                log.close()  # the process has its own
    codes = [worker.wait() for worker in workers]
    return next((code for code in codes if code), 0)


def _after(arguments: list[str], option: str) -> str | None:
    return arguments[arguments.index(option) + 1] if option in arguments[:-1] else None


def _with(arguments: list[str], option: str, value: int) -> list[str]:
    """Return the arguments with an option set, in its place or at the end."""
    if _after(arguments, option) is None:
        return [*arguments, option, str(value)]
    place = arguments.index(option) + 1
    return [*arguments[:place], str(value), *arguments[place + 1 :]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
