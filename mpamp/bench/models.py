"""A workload in all precisions, in turns, in one process."""

from __future__ import annotations

import functools
import gc
import math
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..engine.casts.cache import clear_cache
from ..torch_internals import DYNAMO, inductor_config
from .counts import Counts, count, peak_memory
from .precisions import BASE, Precision, precisions_for
from .rows import Row, with_ratios
from .steps import Job
from .timing import Timing, Variant, measure
from .workloads import Workload

__all__ = ["MODES", "Measuring", "free_memory", "modes_of", "run_workload", "variants"]

MODES = ("eager", "compile", "freezing")


def _on_one_card(model: nn.Module) -> nn.Module:
    return model


@dataclass(frozen=True)
class Measuring:
    """How to measure.

    Attributes:
        device: Where.
        dtype: The lower precision.
        rounds: The turns of each precision.
        turn_s: How long a turn of the slowest should take at least.
        warm_up: The untimed steps at the start of each turn.
        precisions: The names of those wanted; empty is all.
        agree: What makes several processes go by one clock; see ``measure``.
        parallel: Makes of a model what trains on several cards.
    """

    device: torch.device
    dtype: torch.dtype
    rounds: int = 20
    turn_s: float = 0.05
    warm_up: int = 2
    precisions: tuple[str, ...] = ()
    agree: Callable[[int], int] = int
    parallel: Callable[[nn.Module], nn.Module] = _on_one_card


def modes_of(workload: Workload) -> tuple[str, ...]:
    """Return the modes that a workload can run in: weights are only frozen into code that doesn't train them."""
    if workload.is_parallel:
        return MODES[:1]
    return MODES if workload.suite == "infer" else MODES[:2]


def run_workload(workload: Workload, mode: str, how: Measuring, budget_s: float = math.inf) -> list[Row]:
    """Measure a workload in all precisions; one that raises is a failed row, and doesn't stop the others."""
    found = variants(workload, mode, how)
    seen: dict[str, tuple[Counts, int | None]] = {}
    rows = {}
    for name, (variant, job) in found.items():
        empty = Row(workload.suite, workload.name, name, mode)
        try:
            seen[name] = _examined(variant, job, mode, how.device, [j for _, j in found.values()])
        except Exception as error:
            rows[name] = _failed(empty, error)
        else:
            rows[name] = empty
    running = [found[name][0] for name in seen]
    timings = measure(
        running,
        how.device,
        rounds=how.rounds,
        turn_s=how.turn_s,
        warm_up=how.warm_up,
        budget_s=budget_s,
        agree=how.agree,
    )
    for variant, timing in zip(running, timings, strict=True):
        rows[variant.name] = _complete(rows[variant.name], timing, *seen[variant.name])
    return with_ratios(rows.values(), BASE)


def _complete(row: Row, timing: Timing, counts: Counts, peak: int | None) -> Row:
    return Row(row.suite, row.work, row.variant, row.mode, time=timing, peak_bytes=peak, counts=counts)


def _failed(row: Row, error: Exception) -> Row:
    reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return Row(row.suite, row.work, row.variant, row.mode, "failed", reason)


# -- What a step needs -------------------------------------------------------------------------------


def _examined(
    variant: Variant, job: Job, mode: str, device: torch.device, jobs: list[Job]
) -> tuple[Counts, int | None]:
    clear_cache()
    counts = count(variant, list(job.model.parameters()), device, is_compiled=mode != "eager")
    clear_cache()
    for each in jobs:
        each.model.zero_grad()
    peak = peak_memory(variant, device)
    others = {id(each.model): each for each in jobs if each.model is not job.model}
    return counts, None if peak is None else peak - sum(_bytes(each) for each in others.values())


def _bytes(job: Job) -> int:
    """Return the bytes that a model and its optimizers hold, gradients left out."""
    held: list[torch.Tensor] = [*job.model.parameters(), *job.model.buffers()]
    for optimizer in job.optimizers:
        held += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return sum(
        t.untyped_storage().nbytes() for t in {id(t): t for t in held}.values() if t.device.type == held[0].device.type
    )


# -- Variants ----------------------------------------------------------------------------------------


def variants(workload: Workload, mode: str, how: Measuring) -> dict[str, tuple[Variant, Job]]:
    """Return the variants of a workload by name, and what runs the steps of each.

    All but the pure one work on one model and one optimizer, which saves memory and start-up time; their steps
    don't depend on the values.
    """
    wanted = [
        p
        for p in precisions_for(how.device, is_compiled=mode != "eager")
        if not how.precisions or p.name in (BASE, *how.precisions)
    ]
    torch.manual_seed(0)
    batch = tuple(tensor.to(how.device) for tensor in workload.batch())
    models = {pure: _model(workload, pure, how) for pure in sorted({p.is_pure for p in wanted})}
    return {p.name: _variant(p, workload, mode, how, batch, *models[p.is_pure]) for p in wanted}


def _model(workload: Workload, is_pure: bool, how: Measuring) -> tuple[nn.Module, tuple[torch.optim.Optimizer, ...]]:
    torch.manual_seed(0)
    model = workload.model().to(how.device, how.dtype if is_pure else None).train(workload.suite == "train")
    optimizers = []
    for part in workload.parts if workload.suite == "train" else ():
        trained = [weight for weight in model.get_submodule(part).parameters() if weight.requires_grad]
        optimizers.append(torch.optim.AdamW(trained, lr=1e-5, fused=True))
    return how.parallel(model), tuple(optimizers)


def _variant(
    precision: Precision,
    workload: Workload,
    mode: str,
    how: Measuring,
    batch: tuple[torch.Tensor, ...],
    model: nn.Module,
    optimizers: tuple[torch.optim.Optimizer, ...],
) -> tuple[Variant, Job]:
    dtype = how.dtype if precision.is_pure else torch.float32
    cast = tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in batch)
    job = workload.job(model, cast, _compiled if mode != "eager" else _as_it_is, optimizers)
    region, scaler = precision.make_region(how.device, how.dtype), precision.make_scaler(how.device, how.dtype)

    def run(n: int) -> None:
        for _ in range(n):
            job.step(region, scaler)

    context = functools.partial(_freezing, mode == "freezing")
    return Variant(precision.name, run, context, functools.partial(precision.prepare, how.device, how.dtype)), job


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function under code of its own: what is compiled for one precision must not serve another."""
    assert isinstance(function, types.FunctionType)
    own = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    return torch.compile(own, dynamic=False)


def _freezing(is_on: bool) -> AbstractContextManager[Any]:
    if not is_on:
        return nullcontext()
    return inductor_config().patch(freezing=True)  # type: ignore[no-any-return]


def free_memory(device: torch.device) -> None:
    """Give back what the last workload held: kept casts, compiled code, cached blocks."""
    clear_cache()
    if DYNAMO in sys.modules:
        torch.compiler.reset()
    gc.collect()
    module = torch.get_device_module(device)
    if hasattr(module, "empty_cache"):
        module.empty_cache()
