"""A trace as HTML: a table for notebooks, and a page that needs no other file and no network."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from .records import Summary
from .text import COLUMNS, cells, headline

__all__ = ["page", "table_of"]

_STYLE = """
.mpamp-trace { font: 14px/1.45 system-ui, sans-serif; }
.mpamp-trace table { border-collapse: collapse; font-size: 13px; }
.mpamp-trace td, .mpamp-trace th { padding: 3px 9px; border-bottom: 1px solid #8885; text-align: left; }
.mpamp-trace th { cursor: pointer; position: sticky; top: 0; background: Canvas; white-space: nowrap; }
.mpamp-trace .number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.mpamp-trace li { margin: 4px 0; max-width: 75em; }
.mpamp-trace .wide { overflow-x: auto; }
.mpamp-trace input { font: inherit; padding: 4px 8px; margin: 8px 0; width: min(30em, 90%); }
"""
_PAGE_STYLE = ":root { color-scheme: light dark } body { margin: 24px; } h1 { font-size: 20px } h2 { font-size: 16px }"
_SCRIPT = """
const rows = [...document.querySelectorAll("tbody tr")], field = document.querySelector("input");
const texts = rows.map(row => row.textContent.toLowerCase());
field.addEventListener("input", () => {
  const wanted = field.value.toLowerCase();
  rows.forEach((row, i) => { row.hidden = !texts[i].includes(wanted); });
});
document.querySelectorAll("th").forEach((head, column) => head.addEventListener("click", () => {
  const value = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const sign = head.dataset.sign = -(head.dataset.sign ?? 1);
  const compare = (a, b) => isNaN(value(a)) ? sign * -value(a).localeCompare(value(b)) : sign * (value(a) - value(b));
  document.querySelector("tbody").append(...rows.sort(compare));
  rows.forEach((row, i) => { texts[i] = row.textContent.toLowerCase(); });
}));
"""


def _items(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{line}</li>" for line in lines) + "</ul>"


def _findings(summary: Summary) -> str:
    lines = [f"<b>{escape(f.kind)}</b>: {escape(f.text)} <i>{escape(f.advice)}</i>" for f in summary.findings]
    found = _items(lines) if lines else "<p>Nothing.</p>"
    if not summary.by_design:
        return found
    meant = _items(f"{escape(f.text)} <i>{escape(f.advice)}</i>" for f in summary.by_design)
    return f"{found}<details><summary>By design: {len(summary.by_design)}</summary>{meant}</details>"


def _uses(summary: Summary) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    rows = []
    for use in summary.uses:
        numbers = (use.calls, use.casts, use.kept_used, use.cast_bytes, round(use.host_us, 1))
        shown = cells(use)
        texts = [f"<td>{escape(text)}</td>" for text in shown[: -len(numbers)]]
        texts += [
            f'<td class="number" data-value="{number}">{escape(text)}</td>'
            for number, text in zip(numbers, shown[-len(numbers) :], strict=True)
        ]
        rows.append(f"<tr>{''.join(texts)}</tr>")
    body = "\n".join(rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def table_of(summary: Summary) -> str:
    """Return a part of a page that shows a trace."""
    head = f"<p>{escape(headline(summary))}</p>"
    return f'<div class="mpamp-trace"><style>{_STYLE}</style>{head}{_findings(summary)}{_uses(summary)}</div>'


def page(summary: Summary) -> str:
    """Return a whole page, which can be searched and sorted."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>mpamp trace</title><style>{_PAGE_STYLE}{_STYLE}</style></head>
<body class="mpamp-trace"><h1>What autocast did</h1><p>{escape(headline(summary))}</p>
<h2>Findings</h2>{_findings(summary)}
<h2>Ops</h2><input type="search" placeholder="Search modules, ops, dtypes" aria-label="Search">
{_uses(summary)}
<h2>Not seen</h2>{_items(map(escape, summary.unseen))}
<script>{_SCRIPT}</script></body></html>
"""
