"""Terminal and page, from reports made by hand."""

from __future__ import annotations

import io
import math
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from shardfit.findings import Finding, Report, Where
from shardfit.parity.chart import chart
from shardfit.parity.html import page_of
from shardfit.parity.render import Watch, render, verdict_of

STEPS = 12


def quantity(scale=1.0, first=0, values=None):
    original = [5.0 / (1 + step) for step in range(first, STEPS)]
    candidate = values if values is not None else [value * scale for value in original]
    return {"first": first, "original": original, "candidate": candidate, "tolerance": 1e-5}


def row(what, verdict="same", difference=1e-7):
    names = ("original", "candidate", "difference", "tolerance")
    values = (3.25, 3.25, difference, 1e-5) if verdict != "not checked" else (None,) * 4
    return {"what": what, "where": "step 3", "verdict": verdict, **dict(zip(names, values, strict=True))}


def report(*findings, rows=(), scale=1.0, values=None, subject="a.py against b.py"):
    curves = {name: quantity(scale, values=values) for name in ("loss", "gradient norm")}
    peaks = [{"host": 300 << 20, "device": 0}]
    resumed = {name: quantity(first=6) for name in curves}
    return Report(
        tool="parity",
        subject=subject,
        findings=findings,
        looked_at=("compared 12 steps",),
        data={
            "ranks": 2,
            "steps": STEPS,
            "curves": curves,
            "rows": list(rows) or [row("loss"), row("resume at 6, 4 ranks")],
            "resumes": [{"ranks": 4, "at": 6, "curves": resumed, "peak_bytes": peaks * 4, "seconds": 1.0}],
            "peak_bytes": {"original": peaks, "candidate": peaks * 2},
            "tolerances": [],
            "seconds": {},
            "stacks": {},
        },
    )


FAULT = Finding(
    code="SF501",
    severity="error",
    message="built <before> & [bold]markup[/bold]",
    where=Where(step=3),
    evidence="line one\nline <two>",
    fix="Do it.",
)
FAILED = Report(
    tool="parity",
    subject="a.py against b.py",
    data={"failure": {"script": "a.py", "what": "it failed: <x>", "trace": "Traceback\n  <frame>\nE: [x]"}},
    completed=False,
)


def shown(value, *, width=100, **options):
    out = io.StringIO()
    render(value, Console(file=out, width=width, **options))
    return out.getvalue()


def test_terminal_shows_table_curves_memory_and_verdict():
    text = shown(report())
    assert re.search(r"loss +3\.25 +3\.25 +1\.0e-07 \(step 3\) +1\.0e-05 +same", text)
    assert "loss, by step" in text
    assert "gradient norm, by step" in text
    assert "original 300; candidate 300 300; resumed on 4 300 300 300 300" in text
    assert text.rstrip().endswith("the same: a.py against b.py: 12 steps on 2 ranks, and resumed on 4 ranks")


def test_terminal_shows_findings_as_they_are():
    text = shown(report(FAULT, rows=[row("loss", "differs", math.inf)], scale=2.0))
    assert "SF501 error: built <before> & [bold]markup[/bold] (step 3)" in text
    assert "line <two>" in text
    assert "do:   Do it." in text
    assert "NOT THE SAME: a.py against b.py: 1 finding; differs: loss" in text


@pytest.mark.parametrize("width", [20, 40, 60, 200])
@pytest.mark.parametrize("values", [None, [math.nan] * STEPS, [None] * STEPS, [1.0] * STEPS, []])
def test_any_width_and_any_values(width, values):
    for value in (report(FAULT, values=values), FAILED):
        text = shown(value, width=width)
        assert max(map(len, text.splitlines())) <= width
        assert "\x1b" not in text


def test_no_part_of_a_long_path_is_left_out():
    path = "/home/somebody/" + "deep/" * 20 + "train.py"
    fault = Finding(code="SF631", severity="error", message="m", evidence=f'File "{path}", line 3')
    assert path in "".join(shown(report(fault), width=60).split())


def test_color_is_for_terminals_without_no_color(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    options = {"force_terminal": True, "color_system": "standard", "legacy_windows": False}
    assert "\x1b[32m" in shown(report(), **options)
    assert "\x1b[32m" not in shown(report(), no_color=True, **options)


def test_a_failed_original_shows_its_trace():
    text = shown(FAILED)
    assert "it failed: <x>" in text
    assert "  <frame>\nE: [x]" in text
    assert "could not compare" in text


@pytest.mark.parametrize(
    ("rows", "findings", "begin", "end"),
    [
        ([row("loss")], (), "the same", "(resume not checked)"),
        ([row("loss"), row("resume at 6, 4 ranks", "not checked")], (), "the same", "ranks)"),
        ([row("loss", "differs")], (FAULT,), "NOT THE SAME", "differs: loss"),
        ([row("loss")], (FAULT,), "NOT THE SAME", "1 finding"),
    ],
)
def test_verdict_claims_no_more_than_was_checked(rows, findings, begin, end):
    verdict = verdict_of(report(*findings, rows=rows))
    assert verdict.startswith(begin)
    assert verdict.endswith(end)
    assert "resumed on" not in verdict


def test_watch_without_a_terminal_tells_each_run_from_start_to_end():
    out = io.StringIO()
    with Watch(Console(file=out, width=80)) as watch:
        for done in (0, 0, 1, 2, 3, 20, 20):
            watch("original", done, 20)
    lines = out.getvalue().splitlines()
    assert lines[0] == "original: starting"
    assert lines[-1] == "original: step 20 of 20"
    assert len(lines) == len(set(lines))


def test_watch_on_a_terminal_takes_labels_as_text():
    out = io.StringIO()
    with Watch(Console(file=out, width=80, force_terminal=True, legacy_windows=False)) as watch:
        watch("resumed [bold]", 3, 20)
    assert "resumed [bold]" in out.getvalue()


class Page(HTMLParser):
    VOID = ("meta", "line", "polyline", "circle", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text, self.links = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def all(self, name):
        return [attrs for tag, attrs in self.tags if tag == name]


@pytest.mark.parametrize(
    "value",
    [
        report(),
        report(FAULT, scale=2.0),
        report(values=[math.nan, math.inf, None] * 4),
        report(values=[1.0] * STEPS),
        FAILED,
    ],
)
def test_page_is_whole_and_needs_nothing_else(value):
    text = page_of(value)
    page = Page(text)
    assert not page.links
    assert "nan" not in " ".join(str(attrs) for _, attrs in page.tags)
    assert verdict_of(value) in page.text


def test_page_has_curves_of_both_and_their_differences():
    page = Page(page_of(report(scale=1.001)))
    assert len(page.all("svg")) == 4
    assert len(page.all("polyline")) == 2 * (3 + 2)
    longest = max(len(attrs["points"].split()) for attrs in page.all("polyline"))
    assert longest == STEPS
    for attrs in page.all("polyline"):
        for point in attrs["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= 720
            assert 0 <= y <= 240


@pytest.mark.parametrize(("scale", "is_above"), [(1.001, True), (1 + 1e-7, False)])
def test_differences_are_drawn_on_their_side_of_the_tolerance(scale, is_above):
    page = Page(page_of(report(scale=scale)))
    limits = [float(attrs["y1"]) for attrs in page.all("line") if "stroke-dasharray" in attrs]
    assert len(limits) == 2
    # Of each quantity: original, candidate, resumed, then the differences of the last two.
    for at, limit in zip((3, 8), limits, strict=True):
        points = page.all("polyline")[at]["points"].split()
        assert len(points) == STEPS
        assert all((float(point.split(",")[1]) < limit) == is_above for point in points)


def test_page_escapes_all_that_is_not_ours():
    evil = "<script>alert(1)</script>"
    fault = Finding(code="SF501", severity="error", message=evil, evidence=evil, fix=evil)
    value = report(fault, subject=evil, rows=[{**row("loss"), "where": evil, "what": evil}])
    value.data["stacks"]["0"] = evil
    page = Page(page_of(value))
    assert not page.all("script")
    assert sum(evil in text for text in page.text) >= 6


def test_chart_places_first_and_last_values_at_its_corners():
    lines = chart("t", [("a", 5, [4.0, 3.0, 2.0, 1.0]), ("b", 5, [4.0])], columns=40, lines=7)
    assert lines[0] == "t"
    assert lines[1].startswith("4 │o")
    assert lines[7].startswith("1 │")
    assert lines[7].endswith("·")
    assert lines[9].split() == ["5", "8"]
    assert max(map(len, lines)) <= 40
    assert "· a   o b" in lines[10]


def test_chart_leaves_a_gap_for_what_is_not_finite():
    whole = chart("t", [("a", 0, [1.0, 2.0, 3.0, 4.0])], columns=60)
    broken = chart("t", [("a", 0, [1.0, math.nan, 3.0, 4.0])], columns=60)
    count = [sum(line.count("·") for line in lines[1:-1]) for lines in (whole, broken)]
    assert count[1] < count[0] * 0.6
    assert chart("t", [("a", 0, [math.nan, None])], columns=60) == []
