"""The rows of the table that parity shows. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardfit.parity.compare import Comparison

Row = dict[str, Any]
"""JSON-able: "what"; "original" and "candidate" (last values, None where there is none); "difference" and
"tolerance" (None where nothing was compared); "where" (the place of the difference); "verdict":
"same", "differs" or "not checked"."""


def rows_of(comparison: Comparison, resumes: Iterable[tuple[int, int, Comparison | None, str]]) -> list[Row]:
    """Rows for quantities, for the final weights, and for each resume (ranks, at, result, why not)."""
    rows = [
        _row(
            q.name + (", unclipped" if q.name == "gradient norm" else ""),
            original=q.original[-1] if q.original else None,
            candidate=q.candidate[-1] if q.candidate else None,
            difference=q.largest if q.original else None,
            tolerance=q.tolerance,
            where="" if q.at_step is None or not q.largest else f"step {q.at_step}",
            agrees=q.agrees if q.original else None,
        )
        for q in comparison.quantities
    ]
    rows.append(_weights(comparison))
    for ranks, at, result, _ in resumes:
        rows.append(_resume(f"resume at {at}, {ranks} rank{'s' if ranks != 1 else ''}", result))
    return rows


def _weights(comparison: Comparison) -> Row:
    worst = comparison.weights[0] if comparison.weights else None
    apart = comparison.drifted or comparison.missing or comparison.unexpected
    agrees = None if worst is None and not apart else not apart and all(w.agrees for w in comparison.weights)
    return _row(
        f"final weights ({len(comparison.weights)})" if worst else "final weights",
        difference=worst.absolute if worst else None,
        tolerance=worst.tolerance if worst else None,
        where=worst.name if worst and worst.absolute else "",
        agrees=agrees,
    )


def _resume(what: str, result: Comparison | None) -> Row:
    if result is None or not result.num_steps:
        return _row(what, agrees=None if result is None else False)
    # The loss speaks for a resume that agrees; for one that doesn't, what is furthest out of its limit.
    worst = max(
        result.quantities, key=lambda q: (not q.agrees, q.largest / q.tolerance if not q.agrees else 0)
    )
    if worst.agrees:
        worst = result.quantity("loss")
    where = f"{worst.name}, step {worst.at_step}"
    difference, tolerance = worst.largest, worst.tolerance
    if worst.agrees and not result.agrees and result.weights:
        weight = result.weights[0]
        where, difference, tolerance = weight.name, weight.absolute, weight.tolerance
    return _row(
        what,
        original=worst.original[-1],
        candidate=worst.candidate[-1],
        difference=difference,
        tolerance=tolerance,
        where=where,
        agrees=result.agrees,
    )


def _row(
    what: str,
    *,
    original: float | None = None,
    candidate: float | None = None,
    difference: float | None = None,
    tolerance: float | None = None,
    where: str = "",
    agrees: bool | None,
) -> Row:
    verdict = "not checked" if agrees is None else "same" if agrees else "differs"
    return {
        "what": what,
        "original": original,
        "candidate": candidate,
        "difference": difference,
        "tolerance": tolerance,
        "where": where,
        "verdict": verdict,
    }
