"""Claim: what this process knows of a folder, and so what it may write and delete there.

A folder belongs to one run at a time. What another one has put there since this process first
looked is neither resumed from nor deleted: the two runs would take each other's weights.
Standard library only.
"""

from __future__ import annotations

import secrets
import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from shardfit.checkpoint.layout import (
    MANIFEST,
    Slot,
    list_committed,
    list_named,
    list_unfinished,
    next_slot,
    remove,
    sync,
)
from shardfit.checkpoint.retain import choose_expired
from shardfit.errors import ShardfitError


@dataclass
class Claim:
    """One folder, seen from one process.

    Attributes:
        folder: holds the checkpoints.
        token: part of the name of each folder that this process writes.
        known: what was there at the first look, and what this process has committed since.
            None: it has not looked yet.
        continued: it has resumed from here, or saved, so its steps go on from those that are
            there.
        num_saves: saves begun.
    """

    folder: Path
    token: str = field(default_factory=lambda: secrets.token_hex(6))
    known: set[str] | None = None
    continued: bool = False
    num_saves: int = 0

    def find(self, step: int | None) -> Slot | None:
        """The newest committed checkpoint, or that of `step`. None: there is nothing to resume.

        Raises:
            ShardfitError: there is none of `step`; this is no folder of checkpoints; another
                run saves here.
        """
        self._look()
        committed = list_committed(self.folder)
        wanted = [slot for slot in committed if step is None or slot.step == step]
        if not wanted and step is not None:
            raise ShardfitError(
                f"there is no committed checkpoint of step {step}",
                evidence=f"{self.folder} has {', '.join(str(s.step) for s in committed) or 'none'}",
                fix="give one of these steps, or none for the newest",
            )
        found = wanted[-1] if wanted else None
        bare = [slot for slot in list_named(self.folder) if slot not in committed]
        if step is None and bare and (found is None or bare[-1] > found):
            warnings.warn(
                f"{self.folder / bare[-1].name} has no {MANIFEST} (part of a copy?) and is passed over",
                stacklevel=2,
            )
        return found

    def begin(self, step: int) -> tuple[Slot, str]:
        """Make the folder in which `step` is written; its slot, and its name until it is committed.

        Raises:
            ShardfitError: the folder holds later checkpoints of a run that this one does not
                continue; another run saves here.
        """
        self._look()
        named = list_named(self.folder)
        slot = next_slot(named, step)
        if named and slot.generation > named[-1].generation and not self.continued:
            raise ShardfitError(
                "the folder holds a checkpoint of this step or a later one",
                evidence=f"step {named[-1].step} in {self.folder}; this run, which did not resume from "
                f"it, is at step {step}",
                fix="call resume() first, or save a new run to a folder of its own",
            )
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True, exist_ok=True)
            sync(self.folder.parent)
        self.num_saves += 1
        name = f".{slot.name}.saving-{self.token}{self.num_saves:04x}"
        (self.folder / name).mkdir()
        return slot, name

    def settle(self, slot: Slot, *, keep: int | None, keep_every: int | None) -> None:
        """After the commit of `slot`: delete what has had its time, and what failed saves left.

        A failure here costs no checkpoint: it is a warning.
        """
        assert self.known is not None
        self.known.add(slot.name)
        self.continued = True
        committed = [s for s in list_committed(self.folder) if s.name in self.known]
        try:
            for expired in choose_expired(committed, keep=keep, keep_every=keep_every):
                remove(self.folder, expired)
            for name in list_unfinished(self.folder):
                if name in self.known or self.token in name or ".deleting-" in name:
                    shutil.rmtree(self.folder / name)
        except OSError as error:
            warnings.warn(f"an old checkpoint could not be deleted: {error}", stacklevel=2)

    def _look(self) -> None:
        for mark in (MANIFEST, ".metadata"):
            if (self.folder / mark).exists():
                raise ShardfitError(
                    "this is the folder of one checkpoint, not one that holds checkpoints",
                    evidence=f"{self.folder / mark} is there",
                    fix=f"give {self.folder.parent}, and resume(step=...) to choose one",
                )
        listing = {slot.name for slot in list_named(self.folder)}
        listing |= {n for n in list_unfinished(self.folder) if ".saving-" in n and self.token not in n}
        if self.known is None:
            self.known = listing
        if strangers := sorted(listing - self.known):
            raise ShardfitError(
                "another run saves to the same folder",
                evidence=f"{', '.join(strangers)} in {self.folder} is not of this run",
                fix="end one of them, and give each run a folder of its own",
            )


_claims: dict[Path, Claim] = {}


def claim_of(folder: Path) -> Claim:
    """This process's claim on `folder`: one, however many checkpointers use it."""
    return _claims.setdefault(folder, Claim(folder))
