"""The page: a report's values put into the template. Nothing in it is fetched, and all text is escaped."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import resources
from typing import Any

from ..overflow_report import plain
from ..records import OpUse, short_name
from ..text import dtypes, size
from . import charts
from .report import Report

__all__ = ["render", "rows_as_json"]


@cache
def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_text), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(plain=plain, size=size, ms=_ms, number=lambda n: f"{n:,}", marked=_marked)
    environment.globals["style"], environment.globals["program"] = _text("report.css"), _text("report.js")
    return environment.get_template("report.html")


def _text(name: str) -> str:
    return (resources.files(__package__) / "page" / name).read_text(encoding="utf-8")


def render(report: Report) -> str:
    """Return a report as one HTML page."""
    summary = report.summary
    html: str = _template().render(
        report=report,
        summary=summary,
        totals={name: summary.total(name) for name in ("calls", "casts", "kept_used", "cast_bytes", "host_us")},
        modules=len({use.module for use in summary.uses}),
        regions=list(dict.fromkeys((use.device, use.region) for use in summary.uses)),
        by_op=charts.by_op(summary.uses),
        by_module=charts.by_module(summary.uses),
        by_dtype=charts.shares(summary.uses, lambda use: use.calls),
        lines=[(log, charts.scale_line(log)) for log in report.scalers],
        compared=_compared(report),
        rows=rows_as_json(summary.uses),
    )
    return html


def rows_as_json(uses: tuple[OpUse, ...]) -> str:
    """Return the uses as JSON that may stand in a script element; each text is in it once.

    Example:
        >>> rows_as_json(())
        '{"texts": [], "rows": []}'
    """
    texts: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    rows = [
        [
            *map(number, (u.module, short_name(u.op), u.policy or "-", u.rule or "-")),
            *map(number, (dtypes(u.dtypes_in), dtypes(u.dtypes_out), u.phase)),
            *(u.calls, u.casts, u.kept_used, u.cast_bytes, round(u.host_us)),
        ]
        for u in uses
    ]
    text = json.dumps({"texts": list(texts), "rows": rows}, separators=(", ", ": ") if not rows else (",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


_CODE = re.compile(
    r"""with\ mpamp[^:]*:            # a region
    | ops=\{[^}]*\}
    | [\w.]+\((?:[^()]|\([^()]*\))*\)(?:\.\w+\([^()]*\))*   # a call, with calls in it and on it
    | mpamp\.\w+ | \.\w+\(\) | init_scale=\S+ | growth_interval | max_scale""",
    re.VERBOSE,
)


def _marked(text: str) -> Any:
    """Return text in which what is code is marked as such."""
    from markupsafe import Markup

    found, last = Markup(), 0
    for match in _CODE.finditer(text):
        found += text[last : match.start()]
        found += Markup("<code>{}</code>").format(match[0])
        last = match.end()
    return found + text[last:]


def _ms(value: float) -> str:
    return f"{value:.3g} ms" if value < 1000 else f"{value / 1000:.3g} s"


def _compared(report: Report) -> list[tuple[str, list[charts.Bar]]]:
    """Return what is compared, each as two bars: mixed precision and float32."""
    found = report.comparison
    if found is None or found.mixed is None or found.plain is None:
        return []
    pairs: list[tuple[str, float, float, Any]] = []
    if found.mixed["step_ms"] and found.plain["step_ms"]:
        pairs.append(("Time of a step (median)", found.mixed["step_ms"], found.plain["step_ms"], _ms))
    pairs.append(
        ("Time of the whole script", found.mixed["seconds"] * 1e3, found.plain["seconds"] * 1e3, _ms),
    )
    for place in found.mixed["memory"].keys() & found.plain["memory"].keys():
        what = "of the process" if place == "process" else f"of tensors on {place}"
        pairs.append((f"Most memory {what}", found.mixed["memory"][place], found.plain["memory"][place], size))
    return [(title, _two(a, b, found.other, shown)) for title, a, b, shown in pairs]


def _two(mixed: float, other: float, name: str, shown: Any) -> list[charts.Bar]:
    most = max(mixed, other)
    return [
        charts.Bar("as it is", 100 * mixed / most, shown(mixed)),
        charts.Bar(name, 100 * other / most, shown(other), "plain"),
    ]
