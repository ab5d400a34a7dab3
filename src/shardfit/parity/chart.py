"""Curves as lines of text. Standard library only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

MARKS = "·ox+*"
"""Of the first curve, the second, ...; where they meet, the later one is shown."""

Curve = tuple[str, int, Sequence[float | None]]
"""Label, the first value's step, values; None and those that are not finite leave a gap."""


def chart(title: str, curves: Sequence[Curve], *, columns: int, lines: int = 12) -> list[str]:
    """Draw curves over steps, the first as a line and the others as points on it.

    Args:
        columns: at most so wide, at least 24.
        lines: of the drawing itself; title, steps and key come to it.

    Returns:
        Lines without an end; [] where there is nothing to draw.
    """
    points = [(label, _finite(first, values)) for label, first, values in curves]
    every = [point for _, line in points for point in line]
    if not every or columns < 24:
        return []
    left, right = round(min(x for x, _ in every)), round(max(x for x, _ in every))
    low, high = min(y for _, y in every), max(y for _, y in every)
    margin = max(len(_label(low)), len(_label(high))) + 2
    width = columns - margin
    grid = [[" "] * width for _ in range(lines)]

    def place(x: float, y: float) -> tuple[int, int]:
        across = (x - left) / (right - left or 1)
        up = (y - low) / (high - low) if high > low else 0.5
        return round((1 - up) * (lines - 1)), round(across * (width - 1))

    for index, (_, line) in enumerate(points):
        mark = MARKS[min(index, len(MARKS) - 1)]
        for x, y in _filled(line, width) if index == 0 else line:
            row, column = place(x, y)
            grid[row][column] = mark
    labels = {0: _label(high), lines - 1: _label(low)}
    drawn = [
        f"{labels.get(row, ''):>{margin - 2}} │{''.join(cells).rstrip()}" for row, cells in enumerate(grid)
    ]
    steps = f"{left}{right:>{width - len(str(left))}}"
    key = "   ".join(f"{MARKS[min(i, len(MARKS) - 1)]} {label}" for i, (label, _) in enumerate(points))
    return [title, *drawn, " " * (margin - 2) + " └" + "─" * width, " " * margin + steps, " " * margin + key]


def _finite(first: int, values: Sequence[float | None]) -> list[tuple[float, float]]:
    return [(float(first + i), v) for i, v in enumerate(values) if v is not None and math.isfinite(v)]


def _filled(line: Sequence[tuple[float, float]], width: int) -> list[tuple[float, float]]:
    """With enough points between neighbours for a line without holes."""
    filled = list(line)
    for (x0, y0), (x1, y1) in itertools.pairwise(line):
        if x1 - x0 == 1:
            filled += [(x0 + i / width, y0 + (y1 - y0) * i / width) for i in range(1, width)]
    return filled


def _label(value: float) -> str:
    return f"{value:.4g}"
