"""A parity report as one HTML page that needs nothing else: table, curves in SVG, findings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from shardfit import __version__
from shardfit.findings import Finding, Report
from shardfit.parity.render import difference, number, peak_lines, verdict_of

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #60646c; --line: #d9d9e0; --page: #fcfcfd;
  --c0: #60646c; --c1: #0d74ce; --c2: #c2500b; --c3: #218358; --c4: #8e4ec6;
  --bad: #ce2c31; --good: #218358; }
@media (prefers-color-scheme: dark) { :root { --ink: #edeef0; --soft: #b0b4ba; --line: #363a3f;
  --page: #111113;
  --c0: #b0b4ba; --c1: #70b8ff; --c2: #ffa057; --c3: #3dd68c; --c4: #d19dff;
  --bad: #ff9592; --good: #3dd68c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem } h2 { font-size: 1.05rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line) }
td.n, th.n { text-align: right }
.same { color: var(--good) } .differs, .error { color: var(--bad) } .soft { color: var(--soft) }
.scroll { overflow-x: auto } svg { width: 100%; height: auto } pre { white-space: pre-wrap; overflow-x: auto }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft) }
svg .grid { stroke: var(--line) } svg .curve { fill: none; stroke-width: 1.6 }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin: 0 .4em 0 1em }
"""
_WIDTH, _HEIGHT = 720, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 28
_TINY = 1e-12

Curve = tuple[str, int, list[float | None]]
"""Label, first step, values."""


def page_of(report: Report) -> str:
    """The whole page."""
    verdict = "differs" if report.exit_status else "same"
    body = [
        f"<h1>shardfit parity: {escape(report.subject)}</h1>",
        f'<p class="{verdict}"><b>{escape(verdict_of(report))}</b></p>',
    ]
    if report.completed:
        body += _results(report.data)
    else:
        body.append(f"<pre>{escape(report.data['failure']['trace'])}</pre>")
    if report.findings:
        body.append("<h2>Findings</h2>")
        body += [_finding(finding) for finding in report.findings]
    for rank, stacks in report.data.get("stacks", {}).items():
        body.append(
            f"<details><summary>stacks of rank {escape(rank)}</summary><pre>{escape(stacks)}</pre></details>"
        )
    body.append("<h2>What was looked at</h2><ul>")
    body += [f"<li>{escape(sentence)}</li>" for sentence in report.looked_at]
    body.append(f'</ul><p class="soft">shardfit {escape(__version__)}</p>')
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>parity: {escape(report.subject)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _results(data: dict[str, Any]) -> list[str]:
    body = [_table(data["rows"])]
    body += [f'<p class="soft">{escape(line)}</p>' for line in peak_lines(data)]
    for name in ("loss", "gradient norm"):
        own = data["curves"][name]
        pairs: list[tuple[str, int, list[Any], list[Any]]] = [
            ("candidate", own["first"], own["original"], own["candidate"])
        ]
        pairs += [
            (f"resumed on {r['ranks']} ranks", c["first"], c["original"], c["candidate"])
            for r in data["resumes"]
            if (c := r["curves"].get(name))
        ]
        curves: list[Curve] = [("original", own["first"], own["original"])]
        curves += [(label, first, theirs) for label, first, _, theirs in pairs]
        body.append(f"<h2>{escape(name.capitalize())}, by step</h2>{_plot(curves, log=False)}")
        apart: list[Curve] = [
            (label, first, [_relative(a, b) for a, b in zip(ours, theirs, strict=True)])
            for label, first, ours, theirs in pairs
        ]
        title = f"Relative difference of the {name} from the original's (the dashed line is the tolerance)"
        body.append(f"<h2>{escape(title)}</h2>{_plot(apart, log=True, limit=own['tolerance'], color=1)}")
    return body


def _relative(a: float | None, b: float | None) -> float | None:
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
        return None
    return abs(a - b) / max(abs(a), abs(b), _TINY)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    cells = []
    for row in rows:
        where = f" ({row['where']})" if row["where"] else ""
        limit = difference(row["tolerance"]) if row["difference"] is not None else "—"
        cells.append(
            f'<tr><td>{escape(row["what"])}</td><td class="n">{number(row["original"])}</td>'
            f'<td class="n">{number(row["candidate"])}</td>'
            f"<td>{escape(difference(row['difference']) + where)}</td>"
            f'<td class="n">{limit}</td><td class="{row["verdict"].split()[0]}">{row["verdict"]}</td></tr>'
        )
    head = (
        '<tr><th>what</th><th class="n">original</th><th class="n">candidate</th>'
        '<th>largest difference</th><th class="n">tolerance</th><th>verdict</th></tr>'
    )
    return f'<div class="scroll"><table>{head}{"".join(cells)}</table></div>'


def _finding(finding: Finding) -> str:
    place = str(finding.where)
    lines = [
        f'<h3><span class="{finding.severity}">{escape(finding.code)} {finding.severity}</span>: '
        f"{escape(finding.message)}{f' ({escape(place)})' if place else ''}</h3>"
    ]
    if finding.evidence:
        lines.append(f"<pre>seen: {escape(finding.evidence)}</pre>")
    if finding.fix:
        lines.append(f"<p>{escape(finding.fix)}</p>")
    return "".join(lines)


def _plot(curves: Sequence[Curve], *, log: bool, limit: float | None = None, color: int = 0) -> str:
    """An SVG with a line and dots for each curve, and a key below. Gaps where a value is not finite."""
    points = [(label, _points(first, values, log=log)) for label, first, values in curves]
    shown = [y for _, line in points for _, y in line]
    if not shown:
        return '<p class="soft">nothing to show</p>'
    marks = [*shown, math.log10(limit)] if log and limit else shown
    bottom, top = min(marks), max(marks)
    if log:
        bottom, top = math.floor(bottom), math.ceil(top)
    if top - bottom < _TINY:
        bottom, top = bottom - 0.5, top + 0.5
    xs = [x for _, line in points for x, _ in line]
    left, right = min(xs), max(max(xs), min(xs) + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (x - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT),
            _TOP + (top - y) / (top - bottom) * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">']
    for tick in _ticks(bottom, top, whole=log):
        _, y = place(left, tick)
        text = f"1e{tick:.0f}" if log else f"{tick:.4g}"
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
        )
    for tick in _ticks(left, right, whole=True):
        x, _ = place(tick, bottom)
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{tick:.0f}</text>')
    if log and limit:
        _, y = place(left, math.log10(limit))
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
            'stroke="var(--bad)" stroke-dasharray="5 4"/>'
        )
    for index, (_, line) in enumerate(points, start=color):
        ink = f"var(--c{min(index, 4)})"
        placed = [place(x, y) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        width = "" if index else ' style="stroke-width:5;opacity:.45"'
        parts.append(f'<polyline class="curve" stroke="{ink}" points="{path}"{width}/>')
        if index:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{ink}"/>' for x, y in placed]
    parts.append("</svg>")
    keys = "".join(
        f'<span class="key" style="background:var(--c{min(index, 4)})"></span>{escape(label)}'
        for index, (label, _) in enumerate(points, start=color)
    )
    return f"{''.join(parts)}<div>{keys}</div>"


def _points(first: int, values: Iterable[float | None], *, log: bool) -> list[tuple[int, float]]:
    """Those that can be drawn; on the log axis, equal values are at its lowest place."""
    kept = [(first + i, v) for i, v in enumerate(values) if v is not None and math.isfinite(v)]
    return [(x, math.log10(max(y, _TINY))) for x, y in kept] if log else kept


def _ticks(low: float, high: float, *, whole: bool) -> list[float]:
    """About five round numbers between two others."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    if whole:
        step = max(1.0, float(round(step)))
    count = math.ceil(low / step - 1e-9)
    ticks = []
    while count * step <= high + 1e-9 * step:
        ticks.append(count * step)
        count += 1
    return ticks
