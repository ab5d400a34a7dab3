"""Finding and Report: what every checking tool returns. Standard library only."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from shardfit.errors import EXIT_CLEAN, EXIT_COULD_NOT_RUN, EXIT_FINDINGS

Severity = Literal["error", "warning", "note"]
_SARIF_LEVEL = {"error": "error", "warning": "warning", "note": "note"}


@dataclass(frozen=True, kw_only=True)
class Where:
    """A place: any of a source position, a module, a rank, a step, a checkpoint file.

    Lines and columns count from 1, ranks and steps from 0.
    """

    file: str | None = None
    line: int | None = None
    column: int | None = None
    module: str | None = None
    rank: int | None = None
    step: int | None = None

    def __str__(self) -> str:
        parts = []
        if self.file:
            parts.append(":".join(str(p) for p in (self.file, self.line, self.column) if p is not None))
        parts += [
            f"{name} {value}"
            for name, value in (("module", self.module), ("rank", self.rank), ("step", self.step))
            if value is not None
        ]
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One broken rule, in one place.

    Attributes:
        code: the rule's code in `shardfit.rules`.
        severity: "error" is wrong numbers, a hang or lost data; "warning" is likely so;
            "note" is cost.
        message: one sentence.
        where: the place.
        evidence: what was seen.
        fix: what to do.
    """

    code: str
    severity: Severity
    message: str
    where: Where = Where()
    evidence: str = ""
    fix: str = ""

    def __str__(self) -> str:
        place = str(self.where)
        lines = [f"{place + ': ' if place else ''}{self.code} {self.severity}: {self.message}"]
        if self.evidence:
            lines.append(f"    seen: {self.evidence}")
        if self.fix:
            lines.append(f"    do:   {self.fix}")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Findings, and what was looked at, so that "clean" means something.

    Attributes:
        tool: the verb that made it.
        subject: what it was made of (a script, two scripts, a checkpoint).
        findings: most severe first, as the tool ordered them.
        looked_at: sentences: what was checked, and what could not be.
        data: the tool's own figures, JSON-able.
        completed: False where the tool could not run to its end.
    """

    tool: str
    subject: str
    findings: tuple[Finding, ...] = ()
    looked_at: tuple[str, ...] = ()
    data: dict[str, Any] = field(default_factory=dict)
    completed: bool = True

    @property
    def exit_status(self) -> int:
        """0 clean, 1 findings of severity error or warning, 3 could not run."""
        if any(f.severity != "note" for f in self.findings):
            return EXIT_FINDINGS
        return EXIT_CLEAN if self.completed else EXIT_COULD_NOT_RUN

    def to_text(self) -> str:
        lines = [str(finding) for finding in self.findings]
        counts = {level: sum(f.severity == level for f in self.findings) for level in _SARIF_LEVEL}
        total = ", ".join(f"{n} {level}{'s' if n != 1 else ''}" for level, n in counts.items() if n)
        lines.append(f"{self.tool} {self.subject}: {total or 'clean'}")
        lines += [f"  {sentence}" for sentence in self.looked_at]
        return "\n".join(lines)

    def to_json(self) -> str:
        """As JSON that every reader takes: a number that is not finite becomes null."""
        raw = {**dataclasses.asdict(self), "exit_status": self.exit_status}
        return json.dumps(_finite(raw), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Report:
        raw = json.loads(text)
        raw.pop("exit_status", None)
        raw["findings"] = tuple(Finding(**{**f, "where": Where(**f["where"])}) for f in raw["findings"])
        raw["looked_at"] = tuple(raw["looked_at"])
        return cls(**raw)

    def to_sarif(self) -> str:
        """SARIF 2.1.0, as code-scanning services read it."""
        from shardfit import __version__
        from shardfit.rules import RULES

        codes = sorted({f.code for f in self.findings})
        rules = [
            {"id": code, "name": RULES[code].name, "shortDescription": {"text": RULES[code].summary}}
            for code in codes
        ]
        return json.dumps(
            {
                "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
                "version": "2.1.0",
                "runs": [
                    {
                        "invocations": [{"executionSuccessful": self.completed}],
                        "tool": {"driver": {"name": "shardfit", "version": __version__, "rules": rules}},
                        "results": [_sarif_result(f, codes) for f in self.findings],
                    }
                ],
            },
            indent=2,
        )


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _sarif_result(finding: Finding, codes: list[str]) -> dict[str, Any]:
    text = "\n".join(part for part in (finding.message, finding.evidence, finding.fix) if part)
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": codes.index(finding.code),
        "level": _SARIF_LEVEL[finding.severity],
        "message": {"text": text},
    }
    location: dict[str, Any] = {}
    if finding.where.file:
        place: dict[str, Any] = {"artifactLocation": {"uri": finding.where.file}}
        if finding.where.line:
            place["region"] = {"startLine": finding.where.line}
            if finding.where.column:
                place["region"]["startColumn"] = finding.where.column
        location["physicalLocation"] = place
    if finding.where.module:
        location["logicalLocations"] = [{"fullyQualifiedName": finding.where.module, "kind": "module"}]
    if location:
        result["locations"] = [location]
    return result
