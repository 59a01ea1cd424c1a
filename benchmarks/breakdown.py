"""Where the host's time goes in one model's step, by torch.profiler: ``torch.autocast`` against mpamp.

    python benchmarks/breakdown.py --device cuda [--task gpt2-infer-1x16] [--json breakdown.json]

The profiler itself slows every op down: compare the counts and the shares, not the sums; ``ms`` is a step's time
without it.
"""

from __future__ import annotations

from typing import Any

import torch
from common import DTYPES, Variant, measure, parser, print_table, settings, start, synchronizer, write_json
from models import VARIANTS, tasks, variants
from torch.profiler import ProfilerActivity, profile

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
    options = parser(__doc__)
    options.add_argument("--task", help="the task of models.py (default: its first, gpt2-infer-1x16)")
    options.add_argument("--steps", type=int, default=20, help="steps under the profiler (default: 20)")
    options = options.parse_args()
    start(options)
    if options.quick:
        options.steps = 2
    device = options.device
    known = {task.name: task for task in tasks(is_quick=options.quick)}
    if options.task is not None and options.task not in known:
        raise SystemExit(f"no task is called {options.task!r}; there are: {', '.join(known)}")
    task = next(iter(known.values())) if options.task is None else known[options.task]
    made, _ = variants(task, device, DTYPES[options.dtype], 1)
    chosen = {name: variant for name, variant in zip(VARIANTS, made, strict=True) if name in COMPARED}
    turn_s = 0.001 if options.quick else 0.05
    timings = measure(list(chosen.values()), device, rounds=options.rounds, turn_s=turn_s)
    found = {name: profiled(variant, device, options.steps) for name, variant in chosen.items()}
    for timing, row in zip(timings, found.values(), strict=True):
        row["ms"], row["host_ms"] = round(timing.us / 1e3, 4), round(timing.host_us / 1e3, 4)
    print_table(
        f"{task.name}, per step",
        ("variant", "ms", "host ms", *COPIES, "launches", "profiled: us in ops", "us on the device"),
        [_line(name, row) for name, row in found.items()],
    )
    for name, row in found.items():
        lines = [(op["op"], op["calls"], op["self_us"]) for op in row["ops"]]
        print_table(f"{name}: the host's time by op, per step", ("op", "calls", "self us"), lines)
    write_json(options.json, "breakdown", device, settings(options), task=task.name, variants=found)


def _line(name: str, row: dict[str, Any]) -> list[object]:
    copies = [row["copies"][op] for op in COPIES]
    return [name, row["ms"], row["host_ms"], *copies, row["launches"], row["host_us_in_ops"], row["device_us"]]


if __name__ == "__main__":
    main()
