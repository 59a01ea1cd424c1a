"""What to do about what a report holds, the weightiest first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..overflow_report import Overflow, plain
from ..records import Finding
from .report import Advice, Report
from .scaling import ScaleLog

__all__ = ["advise"]

_MOST_FINDINGS = 12
_TOO_FEW = 0.005
"""Of the host's time in ops: what gains less isn't worth a change."""


_FAR = 2.0**24
"""Times what fits: gradients so small don't change a float32 weight whose other gradients are as large as that."""
_MANY_SKIPS = 0.02
"""A scale that doubles every 2,000 steps is too large once in as many."""


def advise(report: Report) -> list[Advice]:
    """Return what to do about what a report holds."""
    found = [*_regions(report), *_overflows(report), *_scales(report), *_underflows(report)]
    found += [*_speed(report), *_findings(report)]
    return sorted(found, key=lambda one: (one.rank, -one.worth))


def _regions(report: Report) -> Iterator[Advice]:
    if report.summary.total("calls") or any(use.phase == "compiled" for use in report.summary.uses):
        return
    device = report.machine["device"]
    known = next((d for d in report.machine["devices"] if d["type"] == device), None)
    dtype = "bfloat16" if known is None else known["default_dtype"]
    region = f'with mpamp.autocast("{device}", dtype=torch.{dtype}):'
    if report.torch_regions:
        yield Advice(
            0,
            1.0,
            "Only regions of torch.autocast ran: their casts can't be listed",
            f"{report.torch_regions} were entered, and none of mpamp's.",
            f"mpamp.install() makes torch's regions mpamp's, as mpamp report script.py does; or write {region}",
        )
    elif report.half_models:
        yield Advice(
            3,
            0.0,
            "No op ran in a region: the weights are in lower precision themselves",
            f"{', '.join(report.half_models)} had parameters in float16 or bfloat16, as after .half() or apex's O2.",
            "Nothing, if that is meant. Weights in float32 and a region keep small updates that float16 weights lose.",
        )
    else:
        more = f' float16 wants a mpamp.GradScaler("{device}") beside it.' if dtype == "float16" else ""
        if known is not None and known["dtypes"].get(dtype) == "emulated":
            more += f" This machine emulates {dtype}, so that it is slower here than float32."
        yield Advice(
            0,
            1.0,
            "No op ran in a region: everything ran in the dtypes that it was called with",
            "The script entered no region of mpamp's or torch's around an op.",
            f"Put the forward pass and the loss, not backward(), into one: {region}{more}",
        )


def _overflows(report: Report) -> Iterator[Advice]:
    steps = report.steps
    for found, count in steps.overflows.values():
        share = count.steps / max(1, steps.watched)
        is_scales = found.phase == "backward" and found.fitting_scale is not None
        where = f"{found.op} in {found.module}" if found.module else found.op
        times = f"In {count.steps} of the {steps.watched} steps that were looked at, first in step {count.first}: "
        yield Advice(
            1 if is_scales or found.phase == "backward" else 0,
            share,
            f"{where} overflows in the {found.phase} pass",
            times + _ranges(found),
            found.advice,
        )


def _ranges(found: Overflow) -> str:
    made = "; ".join(f"{r.label or 'result'} {_dtype(r)} {list(r.shape)}: {r.values}" for r in found.outputs)
    return f"{found.kernel} gave {made}." if made else f"{found.kernel} was given it."


def _dtype(found: Any) -> str:
    return str(found.dtype).removeprefix("torch.")


def _scales(report: Report) -> Iterator[Advice]:
    for log in report.scalers:
        first = 0
        for skip in log.skips:  # the run of skips that the script began with
            if skip.attempt != first + 1:
                break
            first += 1
        if log.skipped == log.attempts:
            yield _nothing_trained(report, log)
        elif first > 1:
            began, fitted = (plain(log.points[i][1]) for i in (0, first))
            yield Advice(
                1,
                first / log.attempts,
                f"The first {first} steps were lost in finding a scale",
                f"The scale began at {began}; {fitted} was the first that fitted.",
                f"GradScaler(init_scale={fitted})",
            )
        later, left = log.skipped - first, log.attempts - first
        if left and later / left > _MANY_SKIPS:
            yield Advice(
                1,
                later / log.attempts,
                f"{later / left:.0%} of the steps were skipped",
                f"{later} of {left} attempts{' after that' if first > 1 else ''} found an inf or NaN in a gradient.",
                "See the culprits under Loss scale. A scale that overflows so often grows too fast: raise "
                "growth_interval, or set max_scale.",
            )
    if not report.scalers and _trains_in_half(report):
        yield _no_scaler()


def _nothing_trained(report: Report, log: ScaleLog) -> Advice:
    last = log.points[-1][1]
    fitting = [o.fitting_scale for o, _ in report.steps.overflows.values() if o.phase == "backward"]
    known = [scale for scale in fitting if scale is not None]
    if known and len(fitting) == len(report.steps.overflows):
        fits = plain(min(*known, last / 2))
        do = f"GradScaler(init_scale={fits}), or run the ops that are named under Loss scale in float32."
    else:
        do = "A smaller scale may not mend that: look at the culprits under Loss scale, and run those ops in float32."
    found = f"{log.skipped} of {log.attempts} attempts found an inf or NaN in a gradient, at scales down to "
    return Advice(0, 1.0, "Every step was skipped: nothing was trained", f"{found}{plain(last)}.", do)


def _no_scaler() -> Advice:
    return Advice(
        1,
        0.5,
        "float16 was trained without a GradScaler",
        "Gradients below 6e-8 become zero in float16, and nothing scales the loss.",
        "scaler = mpamp.GradScaler(); scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update(): or "
        "take bfloat16.",
    )


def _trains_in_half(report: Report) -> bool:
    return bool(report.clock["steps"]) and any(u.region == "float16" and u.casts for u in report.summary.uses)


def _underflows(report: Report) -> Iterator[Advice]:
    steps = report.steps
    lost = sorted(steps.underflows.values(), key=lambda pair: -pair[0].share)
    if not lost:
        return
    worst, count = lost[0]
    more = f" {len(lost) - 1} more parameters lose a tenth or more." if len(lost) > 1 else ""
    keeping = [u.scale_to_keep for u, _ in lost if u.scale_to_keep <= u.largest_scale]
    if keeping:
        do = f"A loss scale of {plain(max(keeping))} keeps {'it' if len(keeping) == 1 else f'those of {len(keeping)}'}."
    else:
        do = f"No scale keeps all: try ops={worst.rule!r}." if worst.rule else "No scale keeps all: try bfloat16."
    is_far = not keeping and worst.scale_to_keep > _FAR * worst.largest_scale
    yield Advice(
        3 if is_far else 1,
        worst.share * count.steps / max(1, steps.watched),
        f"{worst.share:.0%} of the gradient of {worst.parameter} became zero",
        f"Most of it at {worst.op}{f' in {worst.module}' if worst.module else ''}, at a loss scale of "
        f"{plain(worst.scale)}, in {count.steps} of {steps.watched} steps that were looked at.{more}",
        do,
    )


def _speed(report: Report) -> Iterator[Advice]:
    ratio = None if report.comparison is None else report.comparison.ratio
    used = {(use.device, use.region) for use in report.summary.uses if use.region != "float32"}
    for device in report.machine["devices"]:
        slow = sorted(d for d, how in device["dtypes"].items() if how == "emulated" and (device["type"], d) in used)
        if slow:
            yield Advice(
                2,
                1.0,
                f"This {device['type']} emulates {' and '.join(slow)}: it is slower there than float32",
                f"{device['name'] or device['type']} has no units for {'them' if len(slow) > 1 else 'it'}.",
                "Use it here to test; train where the hardware has such units, or in float32.",
            )
    if ratio is not None and ratio > 1.02:
        yield Advice(
            2,
            min(1.0, ratio - 1),
            f"A step takes {ratio:.2f} times as long as in float32",
            "Both were measured with nobody looking.",
            "See the findings below for casts that can be spared; larger batches and layers gain more. Where nothing "
            "helps, float32 is faster here.",
        )


def _findings(report: Report) -> Iterator[Advice]:
    summary = report.summary
    moved, host = max(1, summary.total("cast_bytes")), max(1e-9, summary.total("host_us"))
    cast = summary.total("cast_us")
    for finding in summary.findings[:_MOST_FINDINGS]:
        share = cast / host * min(1.0, finding.cast_bytes / moved)
        yield _finding(finding, share)


def _finding(finding: Finding, share: float) -> Advice:
    spent = f" Its casts take about {share:.0%} of the host's time in ops." if share >= _TOO_FEW else ""
    shipped = " The rule is one that mpamp ships, for its range." if finding.is_shipped else ""
    rank = 2 if share >= _TOO_FEW and not finding.is_shipped else 3
    return Advice(rank, share, _capital(finding.kind), finding.text + spent + shipped, finding.advice)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
