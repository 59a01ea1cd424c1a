"""Everything that needs a card, in one run of under eight minutes: tests, demo, benchmarks and a profile.

    PYTHONPATH=. python benchmarks/gpu_all.py --out DIR [--device cuda] [--parts bench-micro tests ...]

Writes into DIR ``report.json`` (the environment, and what each part did), ``tests.log``, ``breakdown.json``, the
demo's two pictures, and a folder for each suite of ``mpamp bench``. Each part has its own
time limit; one that fails or runs out of time doesn't stop the others.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TAIL = 6000
"""The characters of each part's output that the report keeps."""
PACKAGES = (
    *("pluggy", "packaging", "click", "rich", "sklearn", "matplotlib"),
    *("pytest", "xdist", "hypothesis", "numpy", "torchvision", "transformers"),
)
_DISTRIBUTIONS = {"sklearn": "scikit-learn", "xdist": "pytest-xdist"}


@dataclass(frozen=True)
class Part:
    """One command.

    Attributes:
        name: What it is called in the report.
        command: The arguments of the Python interpreter.
        limit_s: Its time limit.
        needs: The packages without which it is not run.
        makes: The file that it must have written.
        log: The file that its output goes to as a whole, where the report's tail is not enough.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    needs: Sequence[str] = ()
    makes: str | None = None
    log: str | None = None


def parts(out: Path, device: str, *, is_quick: bool) -> list[Part]:
    """Return all parts, in the order in which they run: the shorter and the more telling first."""
    options = ["--device", device, *(["--quick"] if is_quick else [])]

    def bench(suite: str, limit_s: float, *more: str) -> Part:
        name, folder = f"bench-{suite}", out / f"bench-{suite}"
        command = ["-m", "mpamp", "bench", *options, "--suite", suite, "--out", str(folder), *more]
        return Part(name, command, limit_s, ("click", "rich"), f"{name}/bench.json")

    def demo(dtype: str) -> Part:
        made, epochs = f"demo_{dtype}.png", "1" if is_quick else "5"
        command = ["-m", "mpamp", "demo", "--device", device, "--dtype", dtype]
        command += ["--epochs", epochs, "--out", str(out / made)]
        return Part(f"demo_{dtype}", command, 45, ("click", "rich", "sklearn", "matplotlib"), made)

    made = ["--json", str(out / "breakdown.json")]
    chosen = f"{device} or parity or accelerator"
    pytest = [
        "-m",
        "pytest",
        "tests",
        "-q",
        "-k",
        chosen,
        "--continue-on-collection-errors",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        "-W",
        "ignore::pytest.PytestConfigWarning",
    ]
    if _version("xdist") is not None:
        pytest += ["-n", "4"]
    return [
        bench("micro", 90, "--rounds", "15"),
        Part("breakdown", [str(HERE / "breakdown.py"), *options, "--steps", "2", *made], 40, makes="breakdown.json"),
        demo("fp16"),
        demo("bf16"),
        bench("infer", 75, "--budget", "60"),
        bench("train", 90, "--budget", "75"),
        Part("tests", pytest, 160, ("pytest",), log="tests.log"),
    ]


def run(part: Part, out: Path, environ: dict[str, str], limit_s: float) -> dict[str, Any]:
    """Run one part in a process group of its own, and end that when its time is over."""
    missing = [package for package in part.needs if _version(package) is None]
    if missing:
        return {"skipped": f"not installed: {', '.join(missing)}"}
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *part.command],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    output, is_late = _output(process, limit_s)
    if part.log is not None:
        (out / part.log).write_text(output, encoding="utf-8")
    return {
        "exit": process.returncode,
        "timed_out": is_late,
        "is_complete": process.returncode == 0 and (part.makes is None or (out / part.makes).is_file()),
        "seconds": round(time.monotonic() - start, 1),
        "output": output[-TAIL:],
    }


def _output(process: subprocess.Popen[str], limit_s: float) -> tuple[str, bool]:
    """Return what a process prints, and whether it ran out of time; pytest sums up when it is interrupted."""
    for limit, end in ((limit_s, signal.SIGINT), (10, signal.SIGKILL)):
        try:
            return process.communicate(timeout=limit)[0], end is not signal.SIGINT
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, end)
    return process.communicate()[0], True


def environment(device: str) -> dict[str, Any]:
    """Say what is installed here, and which card."""
    import torch

    found: dict[str, Any] = {"python": sys.version.split()[0], "torch": torch.__version__}
    found |= {"cuda": torch.version.cuda, "hip": torch.version.hip}
    found["packages"] = {package: _version(package) for package in PACKAGES}
    module = torch.get_device_module(device)
    found["available"] = bool(module.is_available())
    if found["available"] and hasattr(module, "get_device_name"):
        found["card"] = module.get_device_name()
        found["memory_gib"] = round(module.get_device_properties(0).total_memory / 2**30, 1)
    return found


def _version(package: str) -> str | None:
    """Return the version of a package, found without importing it, or None where it isn't installed."""
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(_DISTRIBUTIONS.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True, help="the folder for the results")
    options.add_argument("--device", default="cuda", help="the device type (default: cuda)")
    options.add_argument("--parts", nargs="+", help="run these only (default: all)")
    options.add_argument(
        "--budget-s", type=float, default=465, help="end everything after so many seconds (default: 465)"
    )
    options.add_argument("--quick", action="store_true", help="a run of seconds per part, to see that everything works")
    options = options.parse_args()
    begin = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"environment": environment(options.device), "parts": {}}
    print(json.dumps(report["environment"]), flush=True)
    environ = {**os.environ, "MPAMP_TEST_DEVICES": options.device, "PYTHONUNBUFFERED": "1"}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    for part in parts(options.out.resolve(), options.device, is_quick=options.quick):
        if options.parts and part.name not in options.parts:
            continue
        left = options.budget_s - (time.monotonic() - begin)
        print(f"[{time.monotonic() - begin:6.1f} s] {part.name}", flush=True)
        result = run(part, options.out, environ, min(part.limit_s, left)) if left > 5 else {"skipped": "out of time"}
        report["parts"][part.name] = result
        report["seconds"] = round(time.monotonic() - begin, 1)
        (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(result.get("output") or "", {k: v for k, v in result.items() if k != "output"}, flush=True)
    print(f"[{time.monotonic() - begin:6.1f} s] done", flush=True)


if __name__ == "__main__":
    main()
