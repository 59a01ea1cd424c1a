"""Run scripts by ``mpamp run`` in forks of one process, and count from outside what mpamp did for each.

``python -m tests.scripts.witness FILE [NAME ...]`` writes what became of the named scripts, or of all that need no
framework, as JSON: by script and run (amp and float32, each with some seeds) its output, its losses and what was
counted.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import socket
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

HERE = Path(__file__).parent
SEEDS = (0, 1, 2)
CHAOTIC = ("gan",)
"""Those whose losses one changed step takes far away: they run in lower precision with every seed too."""

# By name: the script, its arguments in lower precision, those in float32, and how it takes a seed.
SCRIPTS: dict[str, tuple[str, list[str], list[str], str]] = {
    "imagenet-O1": ("imagenet.py", ["--opt-level", "O1"], ["--opt-level", "O0"], "--seed"),
    "imagenet-O2": ("imagenet.py", ["--opt-level", "O2", "--sync_bn"], ["--opt-level", "O0"], "--seed"),
    "gan": ("gan.py", ["--opt_level", "O1", "--niter", "6"], ["--opt_level", "O0", "--niter", "6"], "--manualSeed"),
    "bert": ("bert.py", ["--fp16"], [], "--seed"),
    "fp16util": ("fp16util.py", ["--fp16"], [], "--seed"),
    "fp16util-by-hand": ("fp16util.py", ["--fp16", "--by-hand"], [], "--seed"),
    "spawn": ("spawn.py", ["--opt-level", "O1"], ["--opt-level", "O0"], "--seed"),
    "workers": ("workers.py", ["--opt-level", "O1"], ["--opt-level", "O0"], "--seed"),
    "cuda_amp": ("cuda_amp.py", [], ["--no-amp"], "--seed"),
}
FRAMEWORKS: dict[str, tuple[str, list[str], list[str], str]] = {
    "lightning": ("lightning_digits.py", [], ["--precision", "32-true"], "--seed"),
    "accelerate": ("accelerate_digits.py", [], ["--mixed_precision", "no"], "--seed"),
    "transformers": ("trainer_digits.py", [], ["--no_fp16"], "--seed"),
    "ignite": ("ignite_digits.py", [], ["--no-amp"], "--seed"),
    "timm": ("timm_digits.py", ["--amp"], [], "--seed"),
}
DISTRIBUTED = ("imagenet-O1", "imagenet-O2")
"""Those that torchrun starts."""


class LowerPrecisionKernels(TorchDispatchMode):
    """Count ops whose result is float16 or bfloat16, by name: on this thread and the backward threads it starts."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        if isinstance(first, torch.Tensor) and first.dtype in (torch.float16, torch.bfloat16):
            self.counts[func.name()] += 1
        return result


class Witness:
    """Counts what mpamp's regions and scalers do in this process while it watches."""

    def __init__(self) -> None:
        import mpamp

        self.trace, self.kernels, self.scaler_steps = mpamp.trace(), LowerPrecisionKernels(), 0
        step = mpamp.GradScaler.step

        def counted(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            self.scaler_steps += scaler.is_enabled()
            return step(scaler, *args, **kwargs)

        mpamp.GradScaler.step = counted  # type: ignore[method-assign]
        self.trace.__enter__()
        self.kernels.__enter__()

    def counts(self) -> dict[str, Any]:
        self.kernels.__exit__(None, None, None)
        self.trace.__exit__(None, None, None)
        state = getattr(sys.modules.get("apex.amp"), "_amp_state", None)
        return {
            "casts": self.trace.casts,
            "ops": sorted({use.op for use in self.trace.uses if use.casts}),
            "kernels": dict(self.kernels.counts),
            "scaler_steps": self.scaler_steps,
            "loss_scales": [s.loss_scale() for s in getattr(state, "loss_scalers", [])],  # none before initialize
        }


def watch(file: str) -> None:
    """Have a process that a script starts count too, and add a line to a file when it ends."""
    from multiprocessing import util

    witness = Witness()

    def write() -> None:
        with open(file, "a", encoding="utf-8") as lines:
            lines.write(json.dumps(witness.counts()) + "\n")

    util.Finalize(None, write, exitpriority=100)


def _run(name: str, script: str, arguments: list[str], *, device: str | None) -> dict[str, Any]:
    """Run one script in this process, which is a fork for it alone."""
    from mpamp import children
    from mpamp.cli.app import app

    warnings.simplefilter("ignore")
    file = tempfile.mktemp(suffix=".jsonl")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    if name in DISTRIBUTED:
        os.environ.update(WORLD_SIZE="1", RANK="0", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    if name == "spawn":
        arguments = [*arguments, "--port", port]
        children.announce("tests.scripts.witness:watch", file=file)
    output, error = io.StringIO(), ""
    where = [] if device is None else ["--device", device]
    witness = Witness()
    with redirect_stdout(output):
        try:
            app(["run", *where, str(HERE / script), *arguments], standalone_mode=False)
        except (Exception, SystemExit):
            error = traceback.format_exc()
    found: dict[str, Any] = {"error": error, "output": output.getvalue(), **witness.counts()}
    if os.path.exists(file):
        found["children"] = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
        os.remove(file)
    return found


def _forked(name: str, script: str, arguments: list[str], device: str | None) -> dict[str, Any]:
    """Run one script in a fork; what its own processes print goes into its output."""
    with tempfile.TemporaryDirectory() as folder:
        result, printed = Path(folder, "result"), Path(folder, "printed")
        child = os.fork()
        if child == 0:
            try:
                descriptor = os.open(printed, os.O_CREAT | os.O_WRONLY)
                os.dup2(descriptor, 1)
                result.write_text(json.dumps(_run(name, script, arguments, device=device)), encoding="utf-8")
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        if status or not result.exists():
            raise RuntimeError(f"{script} {' '.join(arguments)}: its process ended with {status} and counted nothing")
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        found["output"] += printed.read_text(encoding="utf-8")
    found["losses"] = [float(loss) for loss in re.findall(r"Loss (-?[\d.]+)", found["output"])]
    return found


def run_all(names: list[str], device: str | None) -> dict[str, Any]:
    """Run scripts in lower precision with the first seed, chaotic ones with each, and all in float32 with each."""
    found: dict[str, Any] = {}
    for name in names:
        script, lower, full, seed = {**SCRIPTS, **FRAMEWORKS}[name]
        runs = {f"amp-{s}": [*lower, seed, str(s)] for s in (SEEDS if name in CHAOTIC else SEEDS[:1])}
        runs |= {f"float32-{s}": [*full, seed, str(s)] for s in SEEDS}
        found[name] = {run: _forked(name, script, arguments, device) for run, arguments in runs.items()}
    return found


def main() -> None:
    torch.set_num_threads(1)
    for module in ("sklearn.datasets", "mpamp.cli.app", "mpamp.apex.amp", "mpamp.redirect", "torch._dynamo"):
        if importlib.util.find_spec(module) is not None:
            importlib.import_module(module)  # once, for all forks
    file, *names = sys.argv[1:]
    Path(file).write_text(json.dumps(run_all(names or list(SCRIPTS), "cpu")), encoding="utf-8")


if __name__ == "__main__":
    main()
