"""``mpamp bench``: what mixed precision costs and gains here, against ``torch.autocast``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from mpamp.bench.engines import ENGINES
from mpamp.bench.models import MODES
from mpamp.bench.precisions import BASE, PRECISIONS
from mpamp.bench.report import Report
from mpamp.bench.worker import DTYPES, Settings, known_works
from mpamp.cli.output import PROBLEM, console
from mpamp.cli.picking import pick_device

__all__ = ["bench"]

_SUITES = {
    "micro": ("micro",),
    "infer": ("infer",),
    "train": ("train",),
    "growth": ("growth",),
    "all": ("micro", "infer", "train", "growth"),
}
_SHORT_DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16"}


@click.command()
@click.option("--suite", type=click.Choice(list(_SUITES)), default="infer", show_default=True, help="What to measure.")
@click.option("--device", "device_name", help="Where, e.g. cuda or xpu:1.  [default: the best here]")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("mpamp-bench"),
    show_default=True,
    help="The folder for bench.json, bench.png and growth.png.",
)
@click.option(
    "--dtype",
    "dtype_name",
    type=click.Choice([*DTYPES, *_SHORT_DTYPE_NAMES]),
    default="bfloat16",
    show_default=True,
    help="The lower precision.",
)
@click.option(
    "--mode",
    "modes",
    type=click.Choice(MODES),
    multiple=True,
    help="How models run; may be repeated.  [default: eager]",
)
@click.option(
    "--engine", "engines", type=click.Choice(ENGINES), multiple=True, help="mpamp's engines.  [default: all that run]"
)
@click.option("--work", "works", multiple=True, help="A workload of infer or train; may be repeated.  [default: all]")
@click.option(
    "--variant",
    "variants",
    type=click.Choice([p.name for p in PRECISIONS]),
    multiple=True,
    help=f"A precision beside {BASE}; may be repeated.  [default: all]",
)
@click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True, help="Turns of each variant.")
@click.option("--budget", "budget_s", type=click.FloatRange(min=0), help="Start nothing more after so many seconds.")
@click.option("--threads", type=click.IntRange(min=1), help="The processor's threads.  [default: as torch has it]")
@click.option("--quick", is_flag=True, help="Tiny sizes, to see that everything works; the times say nothing.")
def bench(
    suite: str,
    device_name: str | None,
    out: Path,
    dtype_name: str,
    modes: tuple[str, ...],
    engines: tuple[str, ...],
    works: tuple[str, ...],
    variants: tuple[str, ...],
    rounds: int,
    budget_s: float | None,
    threads: int | None,
    quick: bool,
) -> None:
    """Measure models, regions, ops and scalers in float32, lower precision, torch.autocast and mpamp.

    Everything that is compared takes turns in one process, with torch.autocast as the base; each engine of mpamp has a
    process of its own. Models are smaller in batch on a processor. The exit code is 1 if mpamp failed anywhere.
    """
    device = pick_device(device_name)
    known = known_works(device, is_quick=quick)
    for work in works:
        if work not in known:
            raise click.BadParameter(f"{work!r} is none; there are: {', '.join(known)}", param_hint="--work")
    engines = engines or ENGINES
    settings = Settings(
        suites=_SUITES[suite],
        device=str(device),
        dtype=_SHORT_DTYPE_NAMES.get(dtype_name, dtype_name),
        modes=tuple(dict.fromkeys(modes)) or MODES[:1],
        works=works,
        variants=variants,
        rounds=min(rounds, 2) if quick else rounds,
        turn_s=0.001 if quick else 0.05,
        budget_s=None if budget_s is None else budget_s / len(engines),
        threads=threads,
        is_quick=quick,
    )
    out.mkdir(parents=True, exist_ok=True)
    report = Report(settings)
    for engine in dict.fromkeys(engines):
        report.measure(engine, out / "bench.json")
    _print(report)
    _draw(report, out)
    if not any(status["status"] == "ran" for status in report.engines.values()):
        raise click.ClickException("no engine ran")
    if report.problems:
        raise SystemExit(PROBLEM)


# -- What is printed -----------------------------------------------------------------------------------


def _print(report: Report) -> None:
    for name, status in report.engines.items():
        where = status["environment"]
        if where is not None:
            click.echo(f"Engine {name}: torch {where['torch']}, {where['card']}, {where['threads']} threads")
        if status["reason"] is not None:
            click.echo(f"Engine {name} {status['status']}: {status['reason']}")
    for suite in dict.fromkeys(row["suite"] for row in report.rows):
        console().print(_table(suite, [row for row in report.rows if row["suite"] == suite], report.settings.dtype))
    _print_reasons(report.rows)
    if report.growth:
        console().print(_growth_table(report.growth))
    for engine, found in report.memory_over_regions.items():
        few, many = found["regions"]
        equal = "equal" if found["is_equal"] else f"{found['bytes_per_region']:g} bytes a region more"
        console().print(f"Memory after {many} regions against {few} ({engine}): {equal}")
    slower = [row for row in report.rows if row["verdict"] == "slower"]
    if slower:
        click.echo(f"{len(slower)} rows of mpamp's are slower than what they are compared with.")
    for problem in report.problems:
        click.echo(f"Problem: {problem}")


def _table(suite: str, rows: Sequence[dict[str, Any]], dtype: str) -> Table:
    unit, per = ("us", 1.0) if suite == "micro" else ("ms", 1e3)
    headings = (unit, "quartiles", "ratio", "peak MB", "kernels", "weight casts", "")
    table = Table("work", "mode", "engine", "variant", title=f"{suite}: one step in {dtype}, medians", box=None)
    for heading in headings:
        table.add_column(heading, justify="right")
    last = None
    for row in rows:
        group = (row["work"], row["mode"], row["engine"])
        if last is not None and group != last:
            table.add_row()
        shown = group if group != last else ("", "", "")
        last = group
        verdict = row["verdict"]
        style = "red" if verdict == "slower" or row["status"] == "failed" else "green" if verdict == "faster" else None
        table.add_row(*shown, row["variant"], *_cells(row, per), style=style)
    return table


def _cells(row: dict[str, Any], per: float) -> Iterable[str]:
    if row["time"] is None:
        yield from ("", "", "", "", "", "", row["status"])
        return
    us, low, high = (f"{row['time'][key] / per:.2f}" for key in ("us", "low_us", "high_us"))
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
    peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}"
    counts = row["counts"] or {}
    seen = (counts.get(key) for key in ("kernels", "weight_casts"))
    yield from (us, f"{low} - {high}", ratio, peak, *("" if n is None else str(n) for n in seen))
    yield row["verdict"] or ""


def _print_reasons(rows: Iterable[dict[str, Any]]) -> None:
    """Print what did not run, and why; what did not for one reason, together."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["reason"] is not None:
            name = f"{row['work']}, {row['mode']}, {row['variant']} ({row['engine']})"
            by_reason.setdefault((row["status"], row["reason"]), []).append(name)
    for (status, reason), names in by_reason.items():
        click.echo(f"{status.capitalize()}: {'; '.join(names)}: {reason}")


def _growth_table(growth: Sequence[dict[str, Any]]) -> Table:
    table = Table("what", "engine", title="growth: what one more costs", box=None)
    for heading in ("up to", "us for one more", "time grows as", "bytes for one more", "memory grows as", ""):
        table.add_column(heading, justify="right")
    for each in growth:
        of_time, of_memory = each["time"], each["memory"]
        is_linear = of_time["is_linear"] and of_memory["is_linear"]
        table.add_row(
            each["subject"],
            each["engine"],
            str(each["points"][-1]["n"]),
            f"{of_time['each']:.2f}",
            f"n^{of_time['exponent']:.2f}",
            f"{of_memory['each']:.0f}",
            f"n^{of_memory['exponent']:.2f}",
            "linear" if is_linear else "not linear",
            style=None if is_linear else "red",
        )
    return table


def _draw(report: Report, out: Path) -> None:
    click.echo(f"Results: {out / 'bench.json'}")
    try:
        from mpamp.bench import plot
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        click.echo("No pictures: matplotlib is not installed: pip install 'mpamp[bench]'")
        return
    if any(row["ratio"] is not None for row in report.rows):
        plot.save_ratios(report.rows, out / "bench.png")
        click.echo(f"Ratios: {out / 'bench.png'}")
    if report.growth:
        plot.save_growth(report.growth, out / "growth.png")
        click.echo(f"Growth: {out / 'growth.png'}")
