"""What the benchmarks share: interleaved timing, counts of what a step runs, plain tables and JSON.

Times of two variants are only compared where they were measured in turns, in one process: on a shared or
warming machine everything else differs by more than the variants do.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mpamp
from mpamp.devices.registry import device_state
from mpamp.engine.python import kernels
from mpamp.testing import KernelCounter, WeightCastCounter

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

Context = Callable[[], AbstractContextManager[Any]]


# -- Whose kernels are in the dispatcher -------------------------------------------------------------


def use_torchs_kernels(device: torch.device) -> None:
    """Take mpamp's kernels out of the dispatcher, so that ``torch.autocast`` runs as if mpamp weren't there."""
    if kernels.installed(device.type):
        kernels.withdraw(device_state(device.type))


def use_mpamps_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Put mpamp's kernels for the device's own table and regions of ``dtype`` into the dispatcher."""
    if not kernels.installed(device.type):
        state = device_state(device.type)
        kernels.install(state, state.table, dtype)


# -- Timing ------------------------------------------------------------------------------------------


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Variant:
    """One way to do the work that is timed.

    Attributes:
        name: What it is called in tables.
        batch: Does the work as many times as it is told.
        context: What each turn runs in, such as an open region; entering it is not timed.
        setup: Called before each turn, not timed.
    """

    name: str
    batch: Callable[[int], None]
    context: Context = nullcontext
    setup: Callable[[], None] = nothing


@dataclass(frozen=True)
class Timing:
    """The time of one execution: the median over all turns, and their quartiles.

    Attributes:
        us: From start to finish, the device's work included, in microseconds.
        low_us: The lower quartile of the same.
        high_us: The upper quartile of the same.
        host_us: Until the host had issued everything; on the CPU the same as ``us``.
        rounds: The turns.
        repeats: The executions in each turn.
    """

    us: float
    low_us: float
    high_us: float
    host_us: float
    rounds: int
    repeats: int


def repeat(step: Callable[[], object]) -> Callable[[int], None]:
    """Return a batch that calls ``step`` again and again."""

    def batch(n: int) -> None:
        for _ in range(n):
            step()

    return batch


def joined(*contexts: Context) -> Context:
    """Return a context that enters all of ``contexts``, in this order."""

    @contextlib.contextmanager
    def enter() -> Any:
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            yield

    return enter


def synchronizer(device: torch.device) -> Callable[[], None]:
    """Return what waits for the device's queued work; the CPU has none."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == device.type:
        return torch.accelerator.synchronize  # type: ignore[no-any-return]
    return nothing


def measure(
    variants: Sequence[Variant],
    device: torch.device,
    *,
    rounds: int = 30,
    turn_s: float = 0.01,
    warm_up: int = 3,
    budget_s: float = math.inf,
) -> list[Timing]:
    """Time variants in turns, each round in another order.

    Args:
        variants: What to time.
        device: Where the work runs.
        rounds: The turns of each variant.
        turn_s: How long a turn of the slowest variant should take at least; sets the repeats.
        warm_up: The untimed executions at the start of each turn, for a variant may leave caches cold to the next.
        budget_s: Start no further round after so many seconds; the first one always runs.

    Returns:
        One timing per variant, in their order.
    """
    start = time.perf_counter()
    synchronize = synchronizer(device)

    def turn(variant: Variant, repeats: int) -> tuple[float, float]:
        variant.setup()
        with variant.context():
            variant.batch(warm_up)
            synchronize()
            begin = time.perf_counter()
            variant.batch(repeats)
            issued = time.perf_counter()
            synchronize()
            end = time.perf_counter()
        return (end - begin) / repeats * 1e6, (issued - begin) / repeats * 1e6

    for variant in variants:
        turn(variant, 1)
    slowest = max(turn(variant, 2)[0] for variant in variants)
    repeats = max(1, math.ceil(turn_s * 1e6 / slowest))
    found: list[list[tuple[float, float]]] = [[] for _ in variants]
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            if number and time.perf_counter() - start > budget_s:
                break
            for place in range(len(variants)):
                index = (place + number) % len(variants)
                found[index].append(turn(variants[index], repeats))
    finally:
        gc.enable()
    return [_timing(turns, repeats) for turns in found]


def _timing(turns: list[tuple[float, float]], repeats: int) -> Timing:
    total = [us for us, _ in turns]
    low, middle, high = statistics.quantiles(total, n=4) if len(total) > 1 else total * 3
    host = statistics.median(us for _, us in turns)
    return Timing(*(round(us, 4) for us in (middle, low, high, host)), len(turns), repeats)


# -- Counting ----------------------------------------------------------------------------------------

_aten = torch.ops.aten
_READS = frozenset({_aten._local_scalar_dense, _aten.nonzero, _aten.equal, _aten.masked_select, _aten.is_nonzero})


class HostSyncCounter(TorchDispatchMode):
    """Count the ops that make the host wait for the device: reads of values, and copies from it.

    The ops that would wait on an accelerator count on the CPU too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = getattr(func, "overloadpacket", None)
        if packet in _READS:
            self.count += 1
        elif packet in (_aten._to_copy, _aten.copy_):
            source, target = (args[0], result) if packet is _aten._to_copy else (args[1], args[0])
            self.count += source.device.type != "cpu" and target.device.type == "cpu"
        return result


class CastCounter(TorchDispatchMode):
    """Count the copies from one dtype to another."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = getattr(func, "overloadpacket", None)
        # In inference mode `to` itself arrives, also where it has nothing to do.
        if packet in (_aten._to_copy, _aten.to):
            self.count += args[0].dtype is not result.dtype
        elif packet is _aten.copy_:
            self.count += args[0].dtype is not args[1].dtype
        return result


@dataclass(frozen=True)
class Counts:
    """What one execution ran.

    Attributes:
        kernels: The ops that reached the device, views included.
        casts: Those that changed a dtype.
        weight_casts: Those that read a parameter and wrote a smaller dtype.
        host_syncs: The times that the host waited for the device.
    """

    kernels: int
    casts: int
    weight_casts: int
    host_syncs: int


def count(variant: Variant, weights: Iterable[torch.Tensor], *, warm_up: int = 2) -> Counts:
    """Count what one execution of a variant runs in the steady state."""
    variant.setup()
    all_kernels, casts, weight_casts, syncs = (
        KernelCounter(),
        CastCounter(),
        WeightCastCounter(weights),
        HostSyncCounter(),
    )
    with variant.context():
        variant.batch(warm_up)
        with all_kernels, casts, weight_casts, syncs:
            variant.batch(1)
    return Counts(all_kernels.total, casts.count, weight_casts.count, syncs.count)


# -- Reports -----------------------------------------------------------------------------------------


def environment(device: torch.device) -> dict[str, Any]:
    """Say what the numbers were measured with."""
    module = torch.get_device_module(device)
    has_name = hasattr(module, "get_device_name")
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "mpamp": mpamp.__version__,
        "device": device.type,
        "card": module.get_device_name() if has_name else f"CPU {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def write_json(path: Path | None, benchmark: str, device: torch.device, settings: dict[str, Any], **parts: Any) -> None:
    """Write a benchmark's results; called again as they come in, it replaces the file."""
    if path is None:
        return
    data = {"benchmark": benchmark, "environment": environment(device), "settings": settings, **parts}
    path.write_text(json.dumps(data, indent=1, default=_plain) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    return asdict(value) if hasattr(value, "__dataclass_fields__") else str(value)


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
    sys.stdout.flush()


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


# -- The command line --------------------------------------------------------------------------------


def parser(description: str | None, *, threads: int | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="where to run (default: cpu)")
    options.add_argument("--dtype", choices=DTYPES, default="bf16", help="the lower precision (default: bf16)")
    options.add_argument("--rounds", type=int, default=30, help="turns of each variant (default: 30)")
    options.add_argument("--threads", type=int, default=threads, help=f"CPU threads (default: {threads or 'as torch'})")
    options.add_argument("--quick", action="store_true", help="a run of a few seconds, to see that everything works")
    options.add_argument("--json", type=Path, help="write the results to this file")
    return options


def start(options: argparse.Namespace) -> None:
    """Apply the common options and print what the benchmark runs on."""
    if options.quick:
        options.rounds, options.threads = min(options.rounds, 3), options.threads or 1
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(", ".join(f"{key} {value}" for key, value in environment(options.device).items()), flush=True)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that the numbers depend on, as JSON can hold them."""
    chosen = {key: value for key, value in vars(options).items() if key != "json"}
    return {key: value if isinstance(value, int | float | str | list) else str(value) for key, value in chosen.items()}
