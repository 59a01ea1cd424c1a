"""Where the host's time goes in one model's step, by torch.profiler: ``torch.autocast`` against mpamp.

    python benchmarks/breakdown.py --device cuda [--work gpt2-infer-1x16] [--json breakdown.json]

The profiler itself slows every op down: compare the counts and the shares, not the sums; ``ms`` is a step's time
without it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from mpamp.bench.models import Measuring, variants
from mpamp.bench.sizes import sizes_for
from mpamp.bench.timing import Variant, measure, synchronizer
from mpamp.bench.worker import DTYPES, environment
from mpamp.bench.workloads import workloads

COMPARED = ("pure", "torch.autocast", "mpamp", "mpamp persistent")
COPIES = ("aten::to", "aten::_to_copy", "aten::copy_")
SHOWN = 20
"""The ops that are listed, those that take the host longest first."""


def profiled(variant: Variant, device: torch.device, steps: int) -> dict[str, Any]:
    """Return what one step of a variant runs on the host and on the device, in microseconds and calls per step."""
    activities = [ProfilerActivity.CPU]
    if device.type != "cpu":
        activities = sorted(torch.profiler.supported_activities(), key=str)
    synchronize = synchronizer(device)
    variant.setup()
    with variant.context():
        variant.batch(5)
        synchronize()
        with profile(activities=activities) as profiler:
            variant.batch(steps)
            synchronize()
    events = profiler.key_averages()
    on_host = [e for e in events if str(e.device_type).endswith("CPU")]
    on_device = [
        e for e in events if not str(e.device_type).endswith("CPU") and not getattr(e, "is_user_annotation", False)
    ]
    ops = [e for e in on_host if "::" in e.key]
    launches = sum(e.count for e in on_host if "launchkernel" in e.key.lower())
    rows = sorted(ops, key=lambda e: e.self_cpu_time_total, reverse=True)
    return {
        "copies": {name: round(sum(e.count for e in ops if e.key == name) / steps, 2) for name in COPIES},
        "launches": round(launches / steps, 2),
        "host_us": round(sum(e.self_cpu_time_total for e in on_host) / steps, 2),
        "host_us_in_ops": round(sum(e.self_cpu_time_total for e in ops) / steps, 2),
        "device_us": round(sum(e.self_device_time_total for e in on_device) / steps, 2),
        "ops": [
            {"op": e.key, "calls": round(e.count / steps, 2), "self_us": round(e.self_cpu_time_total / steps, 2)}
            for e in rows[:SHOWN]
        ],
        "device_kernels": [
            {
                "kernel": e.key[:120],
                "calls": round(e.count / steps, 2),
                "us": round(e.self_device_time_total / steps, 2),
            }
            for e in sorted(on_device, key=lambda e: e.self_device_time_total, reverse=True)[:SHOWN]
        ],
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="where (default: cpu)")
    options.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="the lower precision (default: bfloat16)")
    options.add_argument("--work", help="a workload of mpamp bench (default: its first, gpt2-infer-1x16)")
    options.add_argument("--steps", type=int, default=20, help="steps under the profiler (default: 20)")
    options.add_argument("--rounds", type=int, default=20, help="turns of each variant (default: 20)")
    options.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything works")
    options.add_argument("--json", type=Path, help="write the results to this file")
    options = options.parse_args()
    device, turn_s = options.device, 0.05
    if options.quick:
        options.steps, options.rounds, turn_s = 2, 2, 0.001
    known = {each.name: each for each in workloads(sizes_for(device, is_quick=options.quick)) if not each.is_parallel}
    if options.work is not None and options.work not in known:
        raise SystemExit(f"no workload is called {options.work!r}; there are: {', '.join(known)}")
    workload = next(iter(known.values())) if options.work is None else known[options.work]
    made = variants(workload, "eager", Measuring(device, DTYPES[options.dtype], precisions=COMPARED))
    chosen = {name: variant for name, (variant, _) in made.items()}
    timings = measure(list(chosen.values()), device, rounds=options.rounds, turn_s=turn_s)
    found = {name: profiled(variant, device, options.steps) for name, variant in chosen.items()}
    for timing, row in zip(timings, found.values(), strict=True):
        row["ms"], row["host_ms"] = round(timing.us / 1e3, 4), round(timing.host_us / 1e3, 4)
    print_table(
        f"{workload.name}, per step",
        ("variant", "ms", "host ms", *COPIES, "launches", "profiled: us in ops", "us on the device"),
        [_line(name, row) for name, row in found.items()],
    )
    for name, row in found.items():
        lines = [(op["op"], op["calls"], op["self_us"]) for op in row["ops"]]
        print_table(f"{name}: the host's time by op, per step", ("op", "calls", "self us"), lines)
    if options.json is not None:
        result = {"environment": environment(device), "work": workload.name, "variants": found}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _line(name: str, row: dict[str, Any]) -> list[object]:
    copies = [row["copies"][op] for op in COPIES]
    return [name, row["ms"], row["host_ms"], *copies, row["launches"], row["host_us_in_ops"], row["device_us"]]


def print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under headings, the first column to the left and the others to the right."""
    cells = [list(headings), *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}")
    for number, row in enumerate(cells):
        first, *others = (
            text.ljust(w) if not i else text.rjust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *others]).rstrip())
        if not number:
            print("  ".join("-" * w for w in widths))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
