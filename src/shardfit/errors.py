"""The one exception that a user's mistake raises."""

from __future__ import annotations

EXIT_CLEAN = 0
EXIT_FINDINGS = 1
EXIT_USAGE = 2
EXIT_COULD_NOT_RUN = 3


class ShardfitError(ValueError):
    """A mistake that the user can mend: what is wrong, how we know, what to do.

    Args:
        what: one sentence that names the fault.
        evidence: what was seen (values, names, places).
        fix: what to do about it.
        code: the rule in `shardfit.rules` that it breaks, if there is one.
        exit_status: what a command that meets it exits with
            (2 usage, 3 could not run).
    """

    def __init__(
        self,
        what: str,
        *,
        evidence: str = "",
        fix: str = "",
        code: str | None = None,
        exit_status: int = EXIT_USAGE,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.evidence = evidence
        self.fix = fix
        self.code = code
        self.exit_status = exit_status

    def __str__(self) -> str:
        lines = [f"{self.code}: {self.what}" if self.code else self.what]
        if self.evidence:
            lines.append(f"  seen: {self.evidence}")
        if self.fix:
            lines.append(f"  do:   {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        state = {key: getattr(self, key) for key in ("evidence", "fix", "code", "exit_status")}
        return (_rebuild, (self.what, state))


def _rebuild(what: str, state: dict[str, object]) -> ShardfitError:
    return ShardfitError(what, **state)  # type: ignore[arg-type]
