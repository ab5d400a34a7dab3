"""Where a run is cut: after a number of steps, or after a save; and the state that is kept there."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardfit.parity.observe_files import Files
from shardfit.parity.observe_inputs import Exchange

_SNAPSHOT_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Where the run is cut.

    Attributes:
        steps: it is stopped after this many optimizer steps. None: it ends by itself.
        stop_after_save: stop after the first save at or after this step. None: not.
        snapshot_at: keep a copy of `scratch` in `snapshot` as it is after the first save at or
            after this step (before that, after the first of all). None: no copy.
    """

    steps: int | None = None
    stop_after_save: int | None = None
    snapshot_at: int | None = None
    scratch: Path | None = None
    snapshot: Path | None = None


class Cuts:
    """Decides, on all ranks alike, whether the run is to be stopped, and keeps its state."""

    def __init__(self, limits: Limits, exchange: Exchange, files: Files) -> None:
        self.facts: dict[str, Any] = {}
        self._limits = limits
        self._exchange = exchange
        self._files = files
        self._kept: int | None = None

    def is_complete(self, num_steps: int) -> bool:
        """Whether the run has done its steps."""
        return self._limits.steps is not None and num_steps >= self._limits.steps

    def stops_after_saves(self, num_steps: int) -> bool:
        """At the beginning of a step, when all ranks have passed the place where the script saves.

        Keeps a copy of the state if one is due; True if the run is to stop.
        """
        limits = self._limits
        at = limits.stop_after_save if limits.stop_after_save is not None else limits.snapshot_at
        if at is None or (self._kept is not None and self._kept >= at):
            return False
        self._files.settle()
        newest = max((save.after_steps for save in self._files.saves), default=0)
        key = f"saves/{num_steps}"
        values = self._exchange.all(key, newest)
        # Without word from the others this rank alone must not act.
        if values is None:
            return False
        newest = max(int(value) for value in values)
        if limits.stop_after_save is not None:
            return newest >= at
        if newest > (self._kept or 0) and (self._kept is None or newest >= at):
            self._keep(newest, key)
        return False

    def _keep(self, step: int, key: str) -> None:
        self._kept = step
        if self._exchange.rank == 0:
            scratch, snapshot = self._limits.scratch, self._limits.snapshot
            assert scratch is not None
            assert snapshot is not None
            shutil.rmtree(snapshot, ignore_errors=True)
            shutil.copytree(scratch, snapshot, symlinks=True)
            self.facts["snapshot"] = step
        self._exchange.all(f"{key}/kept", True, timeout_seconds=_SNAPSHOT_SECONDS)
