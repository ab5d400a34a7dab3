"""Run scripts under the recorder: the original, the candidate, and the candidate resumed. No torch.

    original = start_original("train.py", folder=folder / "original", steps=20)
    candidate = start_candidate("train_fsdp2.py", folder=folder / "candidate", ranks=2, steps=20)
    for _ in follow([original, candidate]):
        print(original.num_steps, candidate.num_steps)
    recording = candidate.recording()

`record_original`, `record_candidate` and `record_resumed` do it one at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

from shardfit.parity.recording import Ending, RankRecord, Recording, Save, Step
from shardfit.parity.scratch import Scratch, copy_for_run

TIMEOUT_SECONDS = 60.0
# Building and loading take longer than a step.
_START_FACTOR = 3
_POLL_SECONDS = 0.1
# After all ranks have written their records, for the processes to end.
_GRACE_SECONDS = 5.0
_TAIL_BYTES = 4000
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Run:
    """A script that runs under the recorder, in a process of its own for each rank.

    Attributes:
        folder: holds `scratch` (the copy it runs in), `record`, and `launcher.txt`.
        scratch: where it runs.
        world: number of ranks.
        num_steps: optimizer steps that every rank has done.
        num_target: steps after which it is stopped.
        is_done: it has ended and `recording` can be read.
    """

    def __init__(
        self,
        *,
        folder: Path,
        scratch: Scratch,
        world: int,
        num_target: int,
        is_launched: bool,
        options: Sequence[str],
        timeout_seconds: float,
        first_step: int = 0,
    ) -> None:
        self.folder = folder
        self.scratch = scratch
        self.world = world
        self.num_target = num_target
        self.first_step = first_step
        self.is_done = False
        self._record = folder / "record"
        self._record.mkdir(parents=True)
        self._timeout_seconds = timeout_seconds
        self._began = time.monotonic()
        self._seconds = 0.0
        self._progress = [_Progress(self._record / f"progress-{rank}.jsonl") for rank in range(world)]
        self._written_at: float | None = None
        self._is_hanging = False
        command = [sys.executable, "-m"]
        if is_launched:
            command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "-m"]
        command += ["shardfit.parity.recorder", str(self._record), "--redirect"]
        command += ["--steps", str(num_target), "--scratch", str(scratch.root), *options]
        # An exchange ends before the run counts as hanging: the stacks then show the script's own wait.
        command += ["--exchange-seconds", str(timeout_seconds / 2)]
        command += [str(scratch.script), *scratch.argv]
        env = {name: value for name, value in os.environ.items() if name not in _LAUNCH_VARIABLES}
        env.setdefault("OMP_NUM_THREADS", "1")  # the same order of sums in both
        with (folder / "launcher.txt").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=scratch.cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )

    @property
    def num_steps(self) -> int:
        return min(progress.num_steps for progress in self._progress)

    @property
    def record_folder(self) -> Path:
        return self._record

    def poll(self) -> bool:
        """Look what has happened since the last time; False when it has ended."""
        if self.is_done:
            return False
        for progress in self._progress:
            progress.read()
        now = time.monotonic()
        has_ended = self._process.poll() is not None
        if self._written_at is None and all(self._record_file(r).exists() for r in range(self.world)):
            self._written_at = now
        if self._written_at is not None and now > self._written_at + _GRACE_SECONDS:
            has_ended = True
        if not has_ended and self._is_silent():
            self._is_hanging = has_ended = True
            self._ask_for_stacks()
        if has_ended:
            self._end()
        return not self.is_done

    def recording(self) -> Recording:
        """The records of all ranks; of those that could not write theirs, what they had told until then."""
        assert self.is_done
        return dataclasses.replace(Recording.read(self._record), seconds=self._seconds)

    def kill(self) -> None:
        """End all its processes at once."""
        for pid in [self._process.pid, *(progress.pid for progress in self._progress)]:
            if pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
        self._process.wait()

    def _record_file(self, rank: int) -> Path:
        return self._record / f"rank-{rank}.json"

    def _is_silent(self) -> bool:
        """No rank that still runs has given a sign of life within the limit."""
        running = [p for rank, p in enumerate(self._progress) if not self._record_file(rank).exists()]
        if not running:
            return False
        limit = self._timeout_seconds * (1 if any(p.num_steps for p in self._progress) else _START_FACTOR)
        beats = [p.last_beat for p in running]
        silent = time.time() - max(beats) if any(beats) else time.monotonic() - self._began
        return silent > limit

    def _ask_for_stacks(self) -> None:
        for progress in self._progress:
            if progress.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(progress.pid, signal.SIGUSR1)
        time.sleep(0.5)

    def _end(self) -> None:
        self._seconds = time.monotonic() - self._began
        # A rank's last lines may have come after the look at its file.
        self.kill()
        for progress in self._progress:
            progress.read()
        for rank in range(self.world):
            record = self._record_of(rank)
            if self.first_step or not self._record_file(rank).exists():
                record.write(self._record)
        self.is_done = True

    def _record_of(self, rank: int) -> RankRecord:
        file = self._record_file(rank)
        if file.exists():
            records = Recording.read(self._record).ranks
            mine = next(record for record in records if record.rank == rank)
            return dataclasses.replace(mine, first_step=self.first_step)
        return self._rebuilt(rank)

    def _rebuilt(self, rank: int) -> RankRecord:
        """The record of a rank that hung, was ended or died."""
        progress = self._progress[rank]
        stacks = self._record / f"stacks-{rank}.txt"
        ended: Ending = "hang" if self._is_hanging and not progress.error else "error"
        error = progress.error.strip().splitlines()[-1] if progress.error else ""
        if ended == "error" and not error:
            failed = self._failed_ranks()
            error = (
                f"ended by the launcher after rank {failed[0]} failed"
                if failed
                else "the process died without an exception"
                if progress.pid
                else "the process did not start"
            )
        output = self._record / f"output-{rank}.txt"
        said = _tail(output) or _tail(self.folder / "launcher.txt")
        return RankRecord(
            script=str(self.scratch.script),
            argv=self.scratch.argv,
            rank=rank,
            world=self.world,
            data_rank=rank,
            data_world=self.world,
            torch_version="",
            device="",
            ended=ended,
            first_step=self.first_step,
            steps=tuple(progress.steps),
            saves=tuple(progress.saves),
            facts={**progress.facts, **({"failed_at": progress.failed_at} if progress.failed_at else {})},
            error=error,
            trace=progress.error or said,
            stacks=stacks.read_text(errors="replace") if self._is_hanging and stacks.exists() else "",
        )

    def _failed_ranks(self) -> list[int]:
        """Those that told of an error, the first one first."""
        failed = [(p.failed_at, rank) for rank, p in enumerate(self._progress) if p.failed_at]
        return [rank for _, rank in sorted(failed)]


def start_original(
    script: str | os.PathLike[str],
    *,
    folder: Path,
    argv: Sequence[str] = (),
    steps: int = 20,
    cwd: Path | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Run:
    """Start the original in one process.

    Args:
        script: as the user named it; it runs in a copy of its folder.
        folder: for all that the run leaves; must not exist.
        argv: the script's arguments.
        steps: optimizer steps after which it is stopped.
        cwd: the working folder. None: the current one.
        timeout_seconds: silence (no forward, backward or step on any rank) after which it counts as
            hanging; three times that before the first step.

    Raises:
        ShardfitError: there is no such script.
    """
    scratch = copy_for_run(script, folder.resolve() / "scratch", argv=argv, cwd=cwd)
    return Run(
        folder=folder.resolve(),
        scratch=scratch,
        world=1,
        num_target=steps,
        is_launched=False,
        options=[],
        timeout_seconds=timeout_seconds,
    )


def start_candidate(
    script: str | os.PathLike[str],
    *,
    folder: Path,
    ranks: int = 2,
    argv: Sequence[str] = (),
    steps: int = 20,
    resume_at: int | None = None,
    cwd: Path | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Run:
    """Start the candidate under torchrun, on `ranks` ranks of this machine.

    Args:
        resume_at: the state of its folder is kept as it is after the first save at or after this
            step (or the first save of all, if there is none so late), for `start_resumed`.
            None: half of `steps`. 0: not kept.

    The other arguments are those of `start_original`.
    """
    scratch = copy_for_run(script, folder.resolve() / "scratch", argv=argv, cwd=cwd)
    at = max(1, steps // 2) if resume_at is None else resume_at
    options = ["--snapshot-at", str(at), "--snapshot", str(folder.resolve() / "snapshot")] if at else []
    return Run(
        folder=folder.resolve(),
        scratch=scratch,
        world=ranks,
        num_target=steps,
        is_launched=True,
        options=options,
        timeout_seconds=timeout_seconds,
    )


def saved_step(candidate: Run) -> int | None:
    """After how many steps the candidate's state was kept. None: it saved nothing before its last step."""
    snapshot = candidate.recording().ranks[0].facts.get("snapshot")
    return int(snapshot) if snapshot else None


def start_resumed(
    candidate: Run,
    *,
    folder: Path,
    ranks: int,
    resume_args: Sequence[str] = (),
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Run | None:
    """Start the candidate again from what it had saved, in a copy of its stopped folder.

    It gets the same arguments and `resume_args` after them, and runs to the candidate's last
    step; its records' `first_step` says where it should begin. Whether it read a checkpoint
    at all is in their facts ("reads").

    Returns:
        None if the candidate saved nothing before its last step.
    """
    step = saved_step(candidate)
    if step is None:
        return None
    folder = folder.resolve()
    shutil.copytree(candidate.folder / "snapshot", folder / "scratch", symlinks=True)
    scratch = candidate.scratch.moved(folder / "scratch")
    return Run(
        folder=folder,
        scratch=dataclasses.replace(scratch, argv=(*scratch.argv, *resume_args)),
        world=ranks,
        num_target=candidate.num_target - step,
        is_launched=True,
        options=[],
        timeout_seconds=timeout_seconds,
        first_step=step,
    )


def follow(runs: Iterable[Run]) -> Generator[None, None, None]:
    """Yield a few times a second until all runs have ended; left early, it ends their processes."""
    pending = list(runs)
    try:
        while pending:
            pending = [run for run in pending if run.poll()]
            yield
            if pending:
                time.sleep(_POLL_SECONDS)
    finally:
        for run in pending:
            run.kill()


def record_original(script: str | os.PathLike[str], **arguments: Any) -> Recording:
    """`start_original`, to its end."""
    return _to_end(start_original(script, **arguments)).recording()


def record_candidate(script: str | os.PathLike[str], **arguments: Any) -> Recording:
    """`start_candidate`, to its end."""
    return _to_end(start_candidate(script, **arguments)).recording()


def record_resumed(candidate: Run, **arguments: Any) -> Recording | None:
    """`start_resumed`, to its end."""
    run = start_resumed(candidate, **arguments)
    return None if run is None else _to_end(run).recording()


def _to_end(run: Run) -> Run:
    for _ in follow([run]):
        pass
    return run


class _Progress:
    """What a rank has told so far, line by line."""

    def __init__(self, file: Path) -> None:
        self.pid: int | None = None
        self.steps: list[Step] = []
        self.saves: list[Save] = []
        self.facts: dict[str, Any] = {}
        self.error = ""
        self.failed_at: float | None = None
        self._file = file
        self._at = 0

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    @property
    def last_beat(self) -> float:
        """Time of its last sign of life; 0 before the first."""
        try:
            return self._file.stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def read(self) -> None:
        if not self._file.exists():
            return
        with self._file.open("rb") as stream:
            stream.seek(self._at)
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        if "pid" in line:
            self.pid = line["pid"]
        elif "step" in line:
            raw = line["step"]
            tuples = {name: tuple(raw[name]) for name in ("losses", "lr", "inputs", "rows")}
            self.steps.append(Step(**{**raw, **tuples}))
        elif "save" in line:
            self.saves.append(Save(**line["save"]))
        elif "facts" in line:
            self.facts = line["facts"]
        elif "error" in line:
            self.error, self.failed_at = line["error"], line["failed_at"]


def _tail(file: Path) -> str:
    if not file.exists():
        return ""
    return file.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")


_libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


def _die_with_parent() -> None:
    """In the child, before it becomes the script: it does not outlive this process."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
