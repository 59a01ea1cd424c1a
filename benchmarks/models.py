"""The time of whole steps, inference and training: ResNet-50 and GPT-2 small, in float32 and lower precision.

    python benchmarks/models.py --device cuda [--dtype fp16] [--tasks gpt2-infer-1x16 ...] [--json models.json]

Five variants take turns in one process: float32; the model itself in lower precision (the limit: no casts at
all); ``torch.autocast``, with mpamp's kernels taken out of the dispatcher; ``mpamp.autocast``; and the same with
``persistent_cache=True``. A training step is forward, loss, backward and fused AdamW; fp16 adds a GradScaler.
What a step runs is counted in a pass of its own.
"""

from __future__ import annotations

import functools
import gc
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from common import (
    DTYPES,
    Context,
    Variant,
    count,
    measure,
    nothing,
    parser,
    print_table,
    repeat,
    settings,
    start,
    use_mpamps_kernels,
    use_torchs_kernels,
    write_json,
)
from nets import GPT, ResNet
from torch import nn
from torch.nn.functional import cross_entropy

import mpamp

VARIANTS = ("float32", "pure", "torch.autocast", "mpamp", "mpamp persistent")

_GradScaler = getattr(mpamp, "GradScaler", torch.amp.GradScaler)


# -- What runs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A model and a batch.

    Attributes:
        name: Model, kind and batch.
        is_training: Whether the step trains.
        model: Builds the model, in float32 on the CPU.
        batch: Makes the inputs and the labels, on the CPU.
    """

    name: str
    is_training: bool
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]


def resnet50() -> nn.Module:
    """Build torchvision's ResNet-50, or the one of ``nets.py`` where torchvision is missing or broken."""
    try:
        from torchvision.models import resnet50 as build
    except (ImportError, RuntimeError):
        return ResNet()
    return build(weights=None)  # type: ignore[no-any-return]


def tasks(*, is_quick: bool) -> list[Task]:
    resnet: Callable[[], nn.Module] = resnet50
    gpt: Callable[[], nn.Module] = GPT
    side, classes, vocabulary = 224, 1000, 50257
    image_batches, token_batches = (1, 64), ((1, 16), (8, 1024))
    if is_quick:
        side, classes, vocabulary = 32, 10, 64
        resnet = functools.partial(ResNet, depths=(1, 1), width=8, classes=classes)
        gpt = functools.partial(GPT, layers=2, dim=32, heads=2, vocabulary=vocabulary, context=16)
        image_batches, token_batches = (1,), ((1, 8),)

    def images(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(n, 3, side, side), torch.randint(classes, (n,))

    def tokens(n: int, t: int) -> tuple[torch.Tensor, torch.Tensor]:
        text = torch.randint(vocabulary, (n, t + 1))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    found = []
    for is_training in (False, True):
        kind = "train" if is_training else "infer"
        for n, t in token_batches:
            found.append(Task(f"gpt2-{kind}-{n}x{t}", is_training, gpt, functools.partial(tokens, n, t)))
        for n in image_batches:
            found.append(Task(f"resnet50-{kind}-{n}", is_training, resnet, functools.partial(images, n)))
    return found


# -- One step ----------------------------------------------------------------------------------------


def inference(model: nn.Module, inputs: torch.Tensor, region: Context) -> Callable[[], object]:
    def step() -> None:
        with torch.no_grad(), region():
            model(inputs)

    return step


def training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    region: Context,
    scaler: Any,
    accumulate: int,
) -> Callable[[], object]:
    def step() -> None:
        optimizer.zero_grad()
        for _ in range(accumulate):
            with region():
                loss = cross_entropy(model(inputs).flatten(0, -2), labels.flatten())
            scaler.scale(loss / accumulate).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def variants(
    task: Task, device: torch.device, dtype: torch.dtype, accumulate: int
) -> tuple[list[Variant], list[nn.Module]]:
    """Return the variants of a task, in the order of ``VARIANTS``, and the model of each.

    All but the pure one work on one model and one optimizer, which saves memory and start-up time; their steps
    don't depend on the values.
    """
    inputs, labels = (tensor.to(device) for tensor in task.batch())
    torch.manual_seed(0)
    full = task.model().to(device).train(task.is_training)
    torch.manual_seed(0)
    pure = task.model().to(device, dtype).train(task.is_training)
    optimizers = {m: torch.optim.AdamW(m.parameters(), lr=1e-5, fused=True) for m in (full, pure) if task.is_training}
    low_inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs

    def make(name: str, region: Context = nullcontext, setup: Callable[[], None] = nothing) -> Variant:
        model, x = (pure, low_inputs) if name == "pure" else (full, inputs)
        if not task.is_training:
            return Variant(name, repeat(inference(model, x, region)), setup=setup)
        has_scaler = dtype is torch.float16 and region is not nullcontext
        scaler = _GradScaler(device.type, enabled=has_scaler)
        return Variant(
            name, repeat(training(model, optimizers[model], x, labels, region, scaler, accumulate)), setup=setup
        )

    remove = functools.partial(use_torchs_kernels, device)
    put = functools.partial(use_mpamps_kernels, device, dtype)
    regions: dict[str, tuple[Context, Callable[[], None]]] = {
        "torch.autocast": (functools.partial(torch.autocast, device.type, dtype=dtype), remove),
        "mpamp": (functools.partial(mpamp.autocast, device.type, dtype=dtype), put),
        "mpamp persistent": (functools.partial(mpamp.autocast, device.type, dtype=dtype, persistent_cache=True), put),
    }
    return [make(name, *regions.get(name, ())) for name in VARIANTS], [pure if n == "pure" else full for n in VARIANTS]


# -- The benchmark -----------------------------------------------------------------------------------


def run(task: Task, options: Any, budget_s: float) -> dict[str, Any]:
    device, dtype = options.device, DTYPES[options.dtype]
    made, models = variants(task, device, dtype, options.accumulate)
    counts = [count(v, list(m.parameters())) for v, m in zip(made, models, strict=True)]
    turn_s = 0.001 if options.quick else options.turn_s
    timings = measure(made, device, rounds=options.rounds, turn_s=turn_s, warm_up=2, budget_s=budget_s)
    of = dict(zip(VARIANTS, timings, strict=True))
    return {
        "task": task.name,
        "model": type(models[0]).__module__.partition(".")[0],
        "variants": {n: {"time": t, "counts": c} for n, t, c in zip(VARIANTS, timings, counts, strict=True)},
        "ratio": {n: round(of[n].us / of["torch.autocast"].us, 3) for n in VARIANTS},
    }


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(rounds=20)
    options.add_argument("--tasks", nargs="+", help="run these only, such as gpt2-infer-1x16 (default: all)")
    options.add_argument("--accumulate", type=int, default=1, help="forward and backward passes per training step")
    options.add_argument(
        "--turn-s", type=float, default=0.05, help="seconds of a turn of the slowest variant, at least"
    )
    options.add_argument("--budget-s", type=float, default=math.inf, help="stop after about so many seconds in all")
    options = options.parse_args()
    start(options)
    begin, rows = time.perf_counter(), []
    chosen = [t for t in tasks(is_quick=options.quick) if not options.tasks or t.name in options.tasks]
    if not chosen:
        names = ", ".join(t.name for t in tasks(is_quick=options.quick))
        raise SystemExit(f"no task is called {' or '.join(options.tasks)}; there are: {names}")
    for number, task in enumerate(chosen):
        left = options.budget_s - (time.perf_counter() - begin)
        if left <= 0:
            print(f"\nout of time; not run: {', '.join(t.name for t in chosen[number:])}", flush=True)
            break
        rows.append(run(task, options, left / (len(chosen) - number)))
        _print(rows[-1], options)
        write_json(options.json, "models", options.device, settings(options), rows=rows)
        gc.collect()
        _free_memory(options.device)


def _free_memory(device: torch.device) -> None:
    mpamp.clear_cache()
    module = torch.get_device_module(device)
    if hasattr(module, "empty_cache"):
        module.empty_cache()


def _print(row: dict[str, Any], options: Any) -> None:
    lines = []
    for name, found in row["variants"].items():
        timing, counts = found["time"], found["counts"]
        ms = [us / 1e3 for us in (timing.us, timing.low_us, timing.high_us, timing.host_us)]
        seen = [counts.kernels, counts.casts, counts.weight_casts, counts.host_syncs]
        label = f"{name} {options.dtype}" if name == "pure" else name
        lines.append([label, *ms, row["ratio"][name], *seen])
    rounds = row["variants"]["mpamp"]["time"].rounds
    print_table(
        f"{row['task']} ({row['model']}), one step, ms; medians and quartiles of {rounds} rounds",
        ("variant", "ms", "low", "high", "host", "/ torch.autocast", "kernels", "casts", "weight casts", "syncs"),
        lines,
    )


if __name__ == "__main__":
    main()
