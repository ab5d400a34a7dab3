"""A parity report on a terminal: table, curves, findings, verdict; and the progress of the runs."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from shardfit.findings import Finding, Report
from shardfit.parity.chart import Curve, chart

_COLOR = {"same": "green", "differs": "red", "not checked": "yellow"}
_SEVERITY_COLOR = {"error": "red", "warning": "yellow", "note": "cyan"}
_MAX_PLOT_COLUMNS = 100
_PAGE_COLUMNS = 110
_TRACE_LINES = 40


def open_console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal, as COLUMNS says, or else wide enough for the table."""
    console = Console(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PAGE_COLUMNS
    return console


def render(report: Report, console: Console) -> None:
    """Print the whole report."""
    if not report.completed:
        _print_failure(report, console)
        return
    console.print(_table(report.data["rows"]))
    console.print()
    for line in peak_lines(report.data):
        console.print(Text(line))
    console.print()
    for name in ("loss", "gradient norm"):
        _print_plot(name, report.data, console)
    for finding in report.findings:
        _print_finding(finding, console)
    for sentence in report.looked_at:
        console.print(Padding(Text(sentence, style="dim"), (0, 0, 0, 2)))
    console.print()
    console.print(Text(verdict_of(report), style="bold green" if not report.exit_status else "bold red"))


def verdict_of(report: Report) -> str:
    """One line that says how it came out."""
    if not report.completed:
        return f"could not compare {report.subject}"
    rows = report.data["rows"]
    unchecked = [row["what"] for row in rows if row["verdict"] == "not checked"]
    if num := sum(f.severity != "note" for f in report.findings):
        differs = [row["what"] for row in rows if row["verdict"] == "differs"]
        what = f"; differs: {', '.join(differs)}" if differs else ""
        return f"NOT THE SAME: {report.subject}: {_num(num, 'finding')}{what}"
    resumes = [row for row in rows if row["what"].startswith("resume") and row["verdict"] == "same"]
    counts = [r["ranks"] for r in report.data["resumes"]]
    resumed = f", and resumed on {' and '.join(map(str, counts))} rank{'s' if counts != [1] else ''}"
    tail = f" (not checked: {', '.join(unchecked)})" if unchecked else ""
    if not any(row["what"].startswith("resume") for row in rows):
        tail = " (resume not checked)"
    return (
        f"the same: {report.subject}: {_num(report.data['steps'], 'step')} on "
        f"{_num(report.data['ranks'], 'rank')}"
        f"{resumed if resumes and not unchecked else ''}{tail}"
    )


def _num(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count != 1 else ''}"


def peak_lines(data: dict[str, Any]) -> list[str]:
    """Peak memory of each run's ranks."""
    runs = [(name, peaks) for name, peaks in data["peak_bytes"].items()]
    runs += [(f"resumed on {r['ranks']}", r["peak_bytes"]) for r in data["resumes"]]
    lines = []
    for key, title in (("host", "peak memory per rank, MiB"), ("device", "peak GPU memory per rank, MiB")):
        told = [
            f"{name} {' '.join(f'{peak[key] / 2**20:,.0f}' for peak in peaks)}"
            for name, peaks in runs
            if any(peak[key] for peak in peaks)
        ]
        if told:
            lines.append(f"{title}: {'; '.join(told)}")
    return lines


def number(value: float | None) -> str:
    """For a cell: few digits, and a dash for nothing."""
    if value is None:
        return "—"
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    return f"{value:.6g}" if 1e-3 <= abs(value) < 1e6 else f"{value:.2e}"


def difference(value: float | None) -> str:
    """For a cell: a size, two digits."""
    return "—" if value is None else "0" if value == 0 else f"{value:.1e}"


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("what", overflow="fold")
    for column in ("original", "candidate"):
        table.add_column(column, justify="right", overflow="fold")
    table.add_column("largest difference", overflow="fold")
    table.add_column("tolerance", justify="right", overflow="fold")
    table.add_column("verdict", no_wrap=True)
    for row in rows:
        where = f" ({row['where']})" if row["where"] else ""
        table.add_row(
            Text(row["what"]),
            number(row["original"]),
            number(row["candidate"]),
            Text(difference(row["difference"]) + where),
            difference(row["tolerance"]) if row["difference"] is not None else "—",
            Text(row["verdict"], style=_COLOR[row["verdict"]]),
        )
    return table


def _print_plot(name: str, data: dict[str, Any], console: Console) -> None:
    """The original's curve, and those of the candidate and its resumes on it."""
    curves: list[Curve] = [("original", data["curves"][name]["first"], data["curves"][name]["original"])]
    curves.append(("candidate", data["curves"][name]["first"], data["curves"][name]["candidate"]))
    curves += [
        (f"resumed on {r['ranks']}", r["curves"][name]["first"], r["curves"][name]["candidate"])
        for r in data["resumes"]
        if name in r["curves"]
    ]
    lines = chart(f"{name}, by step", curves, columns=min(console.width, _MAX_PLOT_COLUMNS))
    for line in lines:
        console.print(Text(line), no_wrap=True, overflow="crop")
    if lines:
        console.print()


def _print_finding(finding: Finding, console: Console) -> None:
    style = _SEVERITY_COLOR[finding.severity]
    place = str(finding.where)
    title = Text.assemble((f"{finding.code} {finding.severity}", f"bold {style}"), f": {finding.message}")
    if place:
        title.append(f" ({place})")
    console.print(title)
    for label, text in (("seen", finding.evidence), ("do", finding.fix)):
        if text:
            grid = Table.grid(padding=(0, 1, 0, 0))
            grid.add_column(no_wrap=True)
            grid.add_column(overflow="fold")
            grid.add_row(Text(f"  {label + ':':5}"), Text(text))
            console.print(grid)
    console.print()


def _print_failure(report: Report, console: Console) -> None:
    failure = report.data["failure"]
    console.print(Text(f"{failure['script']} could not be recorded: {failure['what']}", style="bold red"))
    # Paths are to be copied whole: no line is broken.
    console.print(Text(_tail(failure["trace"], _TRACE_LINES)), soft_wrap=True)
    console.print(Text(verdict_of(report), style="bold red"))


def _tail(text: str, num_lines: int) -> str:
    lines = text.rstrip().splitlines()
    return "\n".join(lines[-num_lines:])


class Watch:
    """Shows how far the runs are: bars on a terminal, otherwise a line now and then.

    `with Watch(console) as watch: prove(..., progress=watch)`
    """

    _LINE_SECONDS = 5.0

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tasks: dict[str, TaskID] = {}
        self._told: dict[str, tuple[float, int]] = {}
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )

    def __enter__(self) -> Watch:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def __call__(self, label: str, done: int, target: int) -> None:
        if self._console.is_terminal:
            if label not in self._tasks:
                self._tasks[label] = self._bars.add_task(escape(label), total=target)
            self._bars.update(self._tasks[label], completed=done)
            return
        now = time.monotonic()
        before = self._told.get(label)
        if before is not None and (
            before[1] == done or (now - before[0] < self._LINE_SECONDS and done < target)
        ):
            return
        self._told[label] = (now, done)
        self._console.print(Text(f"{label}: {f'step {done} of {target}' if done else 'starting'}"))
