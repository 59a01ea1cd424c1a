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

_BEGIN = 2.0**16
"""Where torch's scaler begins: what it halves from there on is no fault of a script's."""
_MANY_SKIPS = 0.02
"""A scale that doubles every 2,000 steps is too large once in as many."""


def advise(report: Report) -> list[Advice]:
    """Return what to do about what a report holds."""
    found = [*_regions(report), *_overflows(report), *_scales(report), *_underflows(report), *_training(report)]
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
    elif report.training.low_weights:
        return  # which says the same, and what to do
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
    for place, (found, count) in steps.overflows.items():
        if report.is_start_up(place):
            continue
        share = count.steps / max(1, steps.watched)
        where = f"{found.op} in {found.module}" if found.module else found.op
        times = f"In {count.steps} of the {steps.watched} steps that were looked at, first in step {count.first}: "
        yield Advice(
            1 if found.phase == "backward" else 0,
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
        if not log.has_trained:
            yield _nothing_trained(report, log)
            continue
        lost = sum(skip.scale > _BEGIN for skip in log.skips[: log.start_up])
        if lost > 1:
            began, fitted = (plain(log.scale_at(attempt)) for attempt in (1, log.start_up + 1))
            yield Advice(
                1,
                lost / log.attempts,
                f"The first {log.start_up} steps were lost in finding a scale",
                f"The scale began at {began}; {fitted} was the first that fitted.",
                f"GradScaler(init_scale={fitted})",
            )
        later, left = log.skipped - log.start_up, log.attempts - log.start_up
        if later > 1 and later / left > _MANY_SKIPS:
            yield Advice(
                1,
                later / log.attempts,
                f"{later / left:.0%} of the steps were skipped",
                f"{later} of {left} attempts{' after the first ones' if log.start_up else ''} found an inf or NaN in a "
                "gradient.",
                "See the culprits under Loss scale. A scale that overflows so often grows too fast: raise "
                "growth_interval, or set max_scale.",
            )
    if not report.scalers and _trains_in_half(report):
        yield _no_scaler()


def _nothing_trained(report: Report, log: ScaleLog) -> Advice:
    found = [overflow for overflow, _ in report.steps.overflows.values()]
    if found and all(one.phase == "backward" and one.rule for one in found):
        do = (
            "A GradScaler with a smaller init_scale, or more steps for it to find one; or run the ops that are named "
            "under Loss scale in float32."
        )
    else:
        do = "A smaller scale may not mend that: look at the culprits under Loss scale, and run those ops in float32."
    why = f"{log.skipped} of {log.attempts} attempts found an inf or NaN in a gradient, at scales down to "
    return Advice(
        0, 1.0, "Every step was skipped: nothing was trained", f"{why}{plain(log.scale_at(log.attempts))}.", do
    )


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
    yield Advice(
        1,
        worst.share * count.steps / max(1, steps.watched),
        f"{worst.share:.0%} of the gradient of {worst.parameter} underflows",
        f"Most of it at {worst.op}{f' in {worst.module}' if worst.module else ''}, at a loss scale of "
        f"{plain(worst.scale)}, in {count.steps} of {steps.watched} steps that were looked at.{more}",
        "A larger loss scale may keep it, which a GradScaler finds; mpamp.find_overflow(model, x, loss=...) names one "
        "that it has run. bfloat16 needs none.",
    )


def _training(report: Report) -> Iterator[Advice]:
    found = report.training
    for name, scale in found.clipped_scaled.items():
        yield Advice(
            0,
            1.0,
            f"{name} clipped gradients that were still scaled",
            f"They were up to {plain(scale)} times as large as they are, which is what the limit was held against.",
            "scaler.unscale_(optimizer) before it, after backward().",
        )
    if found.low_weights:
        kinds = " and ".join(found.low_weights)
        count = f"{sum(found.low_weights.values()):,} elements of its parameters are {kinds}, as after .half() or "
        yield Advice(
            1,
            1.0,
            f"An optimizer updates weights in {kinds}: small updates are lost",
            f"{count}.bfloat16(): an update of less than a {'256th' if 'bfloat16' in kinds else '2048th'} of a weight "
            "rounds to none.",
            "Keep the weights in float32, and leave their casts to the region: model.float(), or no .half() and "
            ".bfloat16(); or take an optimizer with float32 master weights.",
        )
    yield from _loops_in_regions(report)


def _loops_in_regions(report: Report) -> Iterator[Advice]:
    found = report.training
    seen = {"backward passes": found.passes_in_regions, "optimizer steps": found.steps_in_regions}
    if not any(seen.values()):
        return
    what = " and ".join(f"{count:,} {name}" for name, count in seen.items() if count)
    yield Advice(
        1,
        0.5,
        "The region is around more than the forward pass and the loss",
        f"{what} ran in a region, which casts for ops that are meant to run as they are called there.",
        "End the region before backward(): only the forward pass and the loss are for it.",
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
