"""`prove`: run the original and the candidate, resume the candidate, compare, name the causes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardfit.errors import ShardfitError
from shardfit.findings import Finding, Report, Where
from shardfit.parity.causes import name_causes, name_resume_causes
from shardfit.parity.compare import Comparison, compare
from shardfit.parity.doubts import doubts_of, name_recorder_failure
from shardfit.parity.recording import Recording
from shardfit.parity.run import (
    TIMEOUT_SECONDS,
    Run,
    follow,
    saved_step,
    start_candidate,
    start_original,
    start_resumed,
)
from shardfit.parity.table import rows_of
from shardfit.rules import RULES

Progress = Callable[[str, int, int], None]
"""Called a few times a second with a run's label, the steps it has done, and those it will do."""

# On a small machine ranks share its cores, and one rank more than these does not help.
_MAX_RESUME_RANKS = 4


@dataclass(frozen=True)
class _Resumed:
    """The candidate, started again: the result, or why there is nothing to compare."""

    ranks: int
    at: int
    run: Run
    recording: Recording
    comparison: Comparison | None
    why_not: str = ""


def prove(
    original: str | os.PathLike[str],
    candidate: str | os.PathLike[str],
    *,
    ranks: int = 2,
    steps: int = 20,
    resume_at: int | None = None,
    resume_ranks: Sequence[int] | None = None,
    resume_args: Sequence[str] = (),
    argv: Sequence[str] = (),
    candidate_argv: Sequence[str] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    keep: str | os.PathLike[str] | None = None,
    rtol: float | None = None,
    progress: Progress | None = None,
) -> Report:
    """Run two scripts, and tell whether the second one trains like the first.

    Args:
        original: runs in one process.
        candidate: runs under torchrun on `ranks` ranks of this machine.
        steps: optimizer steps of each.
        resume_at: the candidate is started again from what it saved at, or first after, this
            step. None: half of `steps`.
        resume_ranks: on how many ranks it is resumed, one run each; (): it is not resumed.
            None: on `ranks`, and on twice as many, at most 4.
        resume_args: arguments that make the candidate resume, added to its others.
        argv: arguments of both scripts.
        candidate_argv: arguments of the candidate in place of `argv`. None: the same.
        timeout_seconds: silence after which a run counts as hanging, see `start_original`.
        keep: a new or empty folder, in which all that the runs leave is kept. None: nothing is kept.
        rtol: relative tolerance of losses and gradient norms in place of `shardfit.parity.tolerance`'s.
        progress: see `Progress`.

    Returns:
        A Report. `data` holds "rows" (see `shardfit.parity.table`), "curves" by quantity, "resumes",
        "peak_bytes" by run and rank, "tolerances", "seconds". Not completed if the original failed.

    Raises:
        ShardfitError: there is no such script; `keep` is not empty; numbers out of range.
    """
    _check_numbers(ranks=ranks, steps=steps, resume_at=resume_at, resume_ranks=resume_ranks)
    theirs = argv if candidate_argv is None else candidate_argv
    if resume_ranks is None:
        resume_ranks = sorted({ranks, max(ranks, min(2 * ranks, _MAX_RESUME_RANKS))})
    subject = f"{os.fspath(original)} against {os.fspath(candidate)}"
    report = progress or (lambda label, done, target: None)
    with _folder(keep) as folder:
        candidate_label = f"candidate, {_num(ranks, 'rank')}"
        starts = {
            "original": lambda: start_original(
                original, folder=folder / "original", argv=argv, steps=steps, timeout_seconds=timeout_seconds
            ),
            candidate_label: lambda: start_candidate(
                candidate,
                folder=folder / "candidate",
                ranks=ranks,
                argv=theirs,
                steps=steps,
                resume_at=resume_at if resume_ranks else 0,
                timeout_seconds=timeout_seconds,
            ),
        }
        _check_files(original, candidate)
        runs = _run_pair(starts, together=_have_room(ranks + 1), progress=report)
        first = runs["original"].recording()
        if (failed := _failure_of(first)) is not None:
            return Report(
                tool="parity",
                subject=subject,
                looked_at=(f"nothing was compared: {failed}",),
                data={
                    "failure": {
                        "script": os.fspath(original),
                        "what": failed,
                        "trace": _trace_of(runs["original"]),
                    }
                },
                completed=False,
            )
        run = runs[candidate_label]
        second = run.recording()
        comparison = compare(first, second, rtol=rtol)
        findings = _read_at_home(name_causes(first, second, comparison), run)
        resumes, sentences = [], []
        ran_well = all(rank.ended in ("finished", "stopped") for rank in second.ranks)
        if resume_ranks and not ran_well:
            sentences.append("resume was not checked: the candidate did not run to its end")
        elif resume_ranks and saved_step(run) is None:
            sentences.append(
                f"resume was not checked: the candidate saved nothing before step {steps}; "
                "pass the script arguments that make it save earlier"
            )
        elif resume_ranks:
            for count in resume_ranks:
                resumed = _resume(run, first, folder, count, resume_args, timeout_seconds, rtol, report)
                resumes.append(resumed)
                if resumed.comparison is None:
                    sentences.append(resumed.why_not)
                else:
                    causes = name_resume_causes(first, second, resumed.recording, resumed.comparison)
                    findings += _new(_read_at_home(causes, resumed.run), findings)
        recordings = {"original": first, "candidate": second}
        recordings |= {f"candidate resumed on {_num(r.ranks, 'rank')}": r.recording for r in resumes}
        for label, recording in recordings.items():
            sentences += doubts_of(label, recording)
            if (failure := name_recorder_failure(label, recording)) is not None:
                findings.append(failure)
        findings += _unnamed(comparison, ran_well, resumes, findings)
        findings.sort(key=lambda f: ("error", "warning", "note").index(f.severity))
        return Report(
            tool="parity",
            subject=subject,
            findings=tuple(findings),
            looked_at=(*_looked_at(comparison, resumes, ranks), *sentences),
            data={
                "ranks": ranks,
                "steps": comparison.num_steps,
                "curves": _curves(comparison),
                "rows": rows_of(comparison, [(r.ranks, r.at, r.comparison, r.why_not) for r in resumes]),
                "resumes": [
                    {
                        "ranks": r.ranks,
                        "at": r.at,
                        "curves": _curves(r.comparison) if r.comparison else {},
                        "peak_bytes": _peaks(r.recording),
                        "seconds": r.recording.seconds,
                    }
                    for r in resumes
                ],
                "peak_bytes": {"original": _peaks(first), "candidate": _peaks(second)},
                "tolerances": list(comparison.tolerances),
                "seconds": {"original": first.seconds, "candidate": second.seconds},
                "stacks": {str(r.rank): _at_home(r.stacks, run) for r in second.ranks if r.stacks},
            },
        )


def _check_numbers(
    *, ranks: int, steps: int, resume_at: int | None, resume_ranks: Sequence[int] | None
) -> None:
    for name, value in (
        ("ranks", ranks),
        ("steps", steps),
        *(("resume ranks", r) for r in resume_ranks or ()),
    ):
        if value < 1:
            raise ShardfitError(f"{name} must be at least 1", evidence=f"{value}")
    if resume_at is not None and not 0 < resume_at < steps:
        raise ShardfitError(
            "the step to resume at must lie within the run",
            evidence=f"step {resume_at} of {steps}",
            fix=f"choose one from 1 to {steps - 1}, or raise --steps" if steps > 1 else "raise --steps",
        )


def _check_files(*scripts: str | os.PathLike[str]) -> None:
    """Both, before either is run."""
    for script in scripts:
        if not Path(script).is_file():
            raise ShardfitError(
                "there is no such script", evidence=os.fspath(script), fix="give the path of a Python file"
            )


@contextlib.contextmanager
def _folder(keep: str | os.PathLike[str] | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="shardfit-", ignore_cleanup_errors=True) as name:
            yield Path(name)
        return
    folder = Path(keep)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ShardfitError(
            "the folder to keep the runs in is not empty", evidence=str(folder), fix="name a new one"
        )
    folder.mkdir(parents=True, exist_ok=True)
    yield folder


def _have_room(num_processes: int) -> bool:
    """Whether both may run at once. Not on a GPU, whose memory they would share."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 2 * cores >= num_processes and not os.path.exists("/dev/nvidiactl")


def _run_pair(starts: dict[str, Callable[[], Run]], *, together: bool, progress: Progress) -> dict[str, Run]:
    """Run both to their ends, the candidate for nothing if the original fails."""
    runs: dict[str, Run] = {}
    for batch in [list(starts)] if together else [[label] for label in starts]:
        try:
            for label in batch:
                runs[label] = starts[label]()
        except BaseException:
            for run in runs.values():
                run.kill()
            raise
        with contextlib.closing(follow([runs[label] for label in batch])) as ticks:
            for _ in ticks:
                for label in batch:
                    progress(label, runs[label].num_steps, runs[label].num_target)
                first = runs["original"]
                if first.is_done and _failure_of(first.recording()) is not None:
                    return runs
    return runs


def _resume(
    run: Run,
    original: Recording,
    folder: Path,
    ranks: int,
    resume_args: Sequence[str],
    timeout_seconds: float,
    rtol: float | None,
    progress: Progress,
) -> _Resumed:
    again = start_resumed(
        run,
        folder=folder / f"resumed-{ranks}",
        ranks=ranks,
        resume_args=resume_args,
        timeout_seconds=timeout_seconds,
    )
    assert again is not None, "it has saved"
    at = again.first_step
    with contextlib.closing(follow([again])) as ticks:
        for _ in ticks:
            progress(f"resumed at {at}, {_num(ranks, 'rank')}", again.num_steps, again.num_target)
    recording = again.recording()
    result = compare(original, recording, rtol=rtol)
    read_nothing = not any(rank.facts.get("reads") for rank in recording.ranks)
    ran_well = all(rank.ended in ("finished", "stopped") for rank in recording.ranks)
    if read_nothing and not resume_args and ran_well and not result.agrees:
        why = (
            f"resume on {_num(ranks, 'rank')} was not checked: the candidate saves, but when it was started "
            "again it read no checkpoint and began at step 0; give --resume-args"
        )
        return _Resumed(ranks, at, again, recording, None, why)
    return _Resumed(ranks, at, again, recording, result)


def _failure_of(recording: Recording) -> str | None:
    """Why the original can't be compared with, as a sentence. None: it can."""
    rank = recording.ranks[0]
    if rank.ended == "error":
        return f"the original failed: {rank.error}"
    if rank.ended == "hang":
        return "the original gave no sign of life and was ended"
    if not rank.steps:
        return "the original ended without an optimizer step"
    return None


def _trace_of(run: Run) -> str:
    rank = run.recording().ranks[0]
    return _at_home(rank.trace or rank.stacks or rank.error, run)


def _at_home(text: str, run: Run) -> str:
    """With the user's files in place of those of the copy that ran."""
    return text.replace(str(run.scratch.root), str(run.scratch.source))


def _read_at_home(findings: Sequence[Finding], run: Run) -> list[Finding]:
    return [dataclasses.replace(f, evidence=_at_home(f.evidence, run)) for f in findings]


def _new(causes: Sequence[Finding], found: Sequence[Finding]) -> list[Finding]:
    """Those that do not say again what was found before."""
    known = {(f.code, f.message, f.where.module) for f in found}
    return [f for f in causes if (f.code, f.message, f.where.module) not in known]


def _unnamed(
    comparison: Comparison, ran_well: bool, resumes: Sequence[_Resumed], findings: Sequence[Finding]
) -> list[Finding]:
    """A difference is never clean, though no cause has a name."""
    if any(f.severity != "note" for f in findings):
        return []
    resume_differs = [r for r in resumes if r.comparison is not None and not r.comparison.agrees]
    if comparison.agrees and ran_well and not resume_differs:
        return []
    step = (
        comparison.first_step if not comparison.agrees else resume_differs[0].at if resume_differs else None
    )
    return [
        RULES["SF630"].finding(
            evidence="the table says what differs", where=Where(step=step, module=comparison.first_tensor)
        )
    ]


def _looked_at(comparison: Comparison, resumes: Sequence[_Resumed], ranks: int) -> list[str]:
    sentences = [
        f"compared {_num(comparison.num_steps, 'step')} in one process with the same steps on "
        f"{_num(ranks, 'rank')}: loss, gradient norm before clipping, learning rate"
        + (f", and {_num(len(comparison.weights), 'final weight')}" if comparison.weights else "")
    ]
    sentences += [
        f"compared the original's steps from {r.at} on with those of the candidate, resumed on "
        f"{_num(r.ranks, 'rank')}"
        for r in resumes
        if r.comparison is not None
    ]
    if not comparison.num_steps:
        return sentences
    if not comparison.weights:
        sentences.append("final weights were not compared: the runs did not end after the same step")
    return sentences + list(comparison.tolerances)


def _curves(comparison: Comparison) -> dict[str, dict[str, object]]:
    return {
        q.name: {
            "first": comparison.first,
            "original": list(q.original),
            "candidate": list(q.candidate),
            "tolerance": q.tolerance,
        }
        for q in comparison.quantities
    }


def _peaks(recording: Recording) -> list[dict[str, int]]:
    return [{"host": r.peak_bytes, "device": r.peak_device_bytes} for r in recording.ranks]


def _num(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
