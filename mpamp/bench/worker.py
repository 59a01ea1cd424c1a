"""The process that measures under one engine: ``python -m mpamp.bench.worker SETTINGS``, which ``engines`` starts.

Its standard output is a line of JSON for each result, so that what was measured before a crash is known after it.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from .._version import __version__
from ..devices.registry import get_backend
from . import ddp, growth
from .micro import ops, regions, scalers
from .models import Measuring, free_memory, modes_of, run_workload
from .rows import Row
from .sizes import sizes_for
from .timing import is_card
from .workloads import Workload, workloads

__all__ = ["DTYPES", "Settings", "known_works", "main"]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        suites: Of ``micro``, ``infer``, ``train`` and ``growth``.
        device: Where.
        dtype: The lower precision.
        modes: Of ``eager``, ``compile`` and ``freezing``.
        works: The workloads of infer and train that are wanted; empty is all.
        variants: The precisions that are wanted, beside the base; empty is all.
        rounds: The turns of each variant.
        turn_s: How long a turn of the slowest variant should take at least.
        budget_s: Start nothing more after so many seconds.
        threads: The processor's threads; None is as torch has it.
        is_quick: Whether to run tiny sizes once, to see that everything works.
    """

    suites: tuple[str, ...]
    device: str
    dtype: str = "bfloat16"
    modes: tuple[str, ...] = ("eager",)
    works: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    rounds: int = 20
    turn_s: float = 0.05
    budget_s: float | None = None
    threads: int | None = None
    is_quick: bool = False


def known_works(device: torch.device, *, is_quick: bool) -> list[str]:
    """Return the names of the workloads that infer and train on a device."""
    return [workload.name for workload in workloads(sizes_for(device, is_quick=is_quick))]


class _Worker:
    """Runs what the settings name, in order, until the time is over."""

    def __init__(self, settings: Settings, out: TextIO) -> None:
        self.settings, self.out = settings, out
        self.start = time.perf_counter()
        self.device, self.dtype = torch.device(settings.device), DTYPES[settings.dtype]
        self.sizes = sizes_for(self.device, is_quick=settings.is_quick)
        # A processor has no queue to fill, and its steps take seconds.
        warm_up = 2 if is_card(self.device) and not settings.is_quick else 0
        self.how = Measuring(self.device, self.dtype, settings.rounds, settings.turn_s, warm_up, settings.variants)

    def tell(self, kind: str, result: Any) -> None:
        print(json.dumps({kind: result}), file=self.out, flush=True)

    def run(self) -> None:
        self.tell("environment", environment(self.device))
        tasks = list(self._tasks())
        for number, (suite, work, mode, task) in enumerate(tasks):
            left = self._left()
            if left <= 0:
                self._skip(suite, work, mode, "out of time")
                continue
            print(f"[{time.perf_counter() - self.start:6.1f} s] {suite}: {work}, {mode}", file=sys.stderr, flush=True)
            try:
                task(left / (len(tasks) - number))
            except Exception as error:
                self._rows([Row(suite, work, "mpamp", mode, "failed", f"{type(error).__name__}: {error}")])
            free_memory(self.device)

    def _left(self) -> float:
        budget = self.settings.budget_s
        return float("inf") if budget is None else budget - (time.perf_counter() - self.start)

    def _skip(self, suite: str, work: str, mode: str, reason: str) -> None:
        self._rows([Row(suite, work, "all", mode, "skipped", reason)])

    def _rows(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.tell("row", {**asdict(row), "verdict": row.verdict})

    # -- What there is to do -------------------------------------------------------------------------

    def _tasks(self) -> Iterable[tuple[str, str, str, Callable[[float], None]]]:
        quick = {"is_quick": self.settings.is_quick}
        device, dtype, rounds = self.device, self.dtype, self.settings.rounds
        if "micro" in self.settings.suites:
            yield "micro", "regions", "eager", lambda _: self._rows(regions.run(device, dtype, rounds, **quick))
            yield "micro", "ops", "eager", lambda _: self._rows(ops.run(device, dtype, rounds, **quick))
            yield "micro", "scalers", "eager", lambda _: self._rows(scalers.run(device, rounds, **quick))
        yield from self._models()
        if "growth" in self.settings.suites:
            for subject in growth.SUBJECTS:
                yield "growth", subject, "eager", lambda _, subject=subject: self._growth(subject)  # type: ignore[misc]
            yield "growth", "memory over regions", "eager", lambda _: self._memory()

    def _models(self) -> Iterable[tuple[str, str, str, Callable[[float], None]]]:
        wanted = [
            w
            for w in workloads(self.sizes)
            if w.suite in self.settings.suites and (not self.settings.works or w.name in self.settings.works)
        ]
        for mode in self.settings.modes:
            for workload in wanted:
                if mode in modes_of(workload):
                    yield workload.suite, workload.name, mode, self._task(workload, mode)

    def _task(self, workload: Workload, mode: str) -> Callable[[float], None]:
        def task(budget_s: float) -> None:
            why_not = _why_not(workload, mode, self.device)
            if why_not is not None:
                self._skip(workload.suite, workload.name, mode, why_not)
            elif workload.is_parallel:
                self._rows(ddp.run(self.sizes, self.how, budget_s))
            else:
                self._rows(run_workload(workload, mode, self.how, budget_s))

        return task

    def _growth(self, subject: str) -> None:
        rounds = 2 if self.settings.is_quick else 5
        found = growth.run(subject, self.device, self.dtype, rounds=rounds, is_quick=self.settings.is_quick)
        self.tell("growth", asdict(found))

    def _memory(self) -> None:
        many = 3000 if self.settings.is_quick else 100_000
        self.tell("memory_over_regions", growth.memory_over_regions(self.device, self.dtype, few=1000, many=many))


def _why_not(workload: Workload, mode: str, device: torch.device) -> str | None:
    """Say why this machine can't run a workload in a mode; None if it can."""
    if workload.is_parallel:
        count = torch.get_device_module(device).device_count()
        if count < ddp.WORLD:
            return f"needs {ddp.WORLD} {device.type} devices; there is {count}"
    return None if mode == "eager" else _why_not_compiled(device)


_compilers: dict[str, str | None] = {}


def _why_not_compiled(device: torch.device) -> str | None:
    """Say why torch.compile doesn't work here, as it says itself of the smallest program."""
    if device.type not in _compilers:
        try:
            torch.compile(lambda x: x + 1)(torch.ones(2, device=device))
        except Exception as error:
            _compilers[device.type] = f"torch.compile: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        else:
            _compilers[device.type] = None
    return _compilers[device.type]


def environment(device: torch.device) -> dict[str, Any]:
    """Say what the numbers are measured with."""
    module, backend = torch.get_device_module(device), get_backend(device)
    is_named = hasattr(module, "get_device_name")
    return {
        "mpamp": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device.type,
        "card": module.get_device_name() if is_named else f"CPU {torch.backends.cpu.get_cpu_capability()}",
        "cards": module.device_count(),
        "emulated": [name for name, dtype in DTYPES.items() if backend.is_emulated(dtype)],
        "toolkit": torch.version.cuda or torch.version.hip or torch.version.xpu,
        "machine": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def main() -> None:
    """Measure what the settings in the first argument say."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(sys.argv[1]).items()}
    settings = Settings(**values)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    # What torch, its compiler and its allocators warn of has no bearing on a time.
    warnings.simplefilter("ignore")
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)  # what others print, compilers among them, is no result
        _Worker(settings, out).run()


if __name__ == "__main__":
    main()
