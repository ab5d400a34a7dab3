"""Checkpointer: save, resume, latest."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardfit.checkpoint.layout import Slot, list_committed, list_unfinished, next_slot, remove
from shardfit.checkpoint.load import load
from shardfit.checkpoint.manifest import Manifest
from shardfit.checkpoint.peers import Peers, find_peers
from shardfit.checkpoint.random import random_state, set_random_state
from shardfit.checkpoint.retain import check_policy, choose_expired
from shardfit.checkpoint.save import Parts, collect, write
from shardfit.errors import ShardfitError
from shardfit.train.launch import Ranks, patient

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

# Folders in which this process has saved, or from which it has resumed: it may go back in them.
_continued: set[Path] = set()


class Checkpointer:
    """Saves a run, and resumes it, at any number of ranks.

        checkpointer = Checkpointer("runs/a", model=model, optimizer=optimizer, scheduler=scheduler)
        step = checkpointer.resume() or 0
        while step < num_steps:
            ...
            step += 1
            if step % 100 == 0:
                checkpointer.save(step)

    All methods but `latest` are called on all ranks, and an error on one is raised on all. A
    save that fails, or dies, leaves the checkpoints before it as they were.

    Args:
        folder: holds one folder a checkpoint; on storage that all hosts share.
        model: sharded or plain; built and materialised.
        optimizer: one, or several; saved by parameter names.
        scheduler: one, or several.
        scaler: such as `torch.amp.GradScaler`.
        loader: anything with state_dict and load_state_dict; saved for each data rank.
        extra: such objects, or plain values, by name; the same on all ranks. Values are read
            from this dict at each save, and put back into it by `resume`.
        ranks: None: those of `init_distributed`, or of the process group, or one process.
        keep: how many of the newest checkpoints stay after a save. None: all.
        keep_every: checkpoints whose step is a multiple of it stay for good.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        model: nn.Module,
        optimizer: Optimizers | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        loader: Any = None,
        extra: dict[str, Any] | None = None,
        ranks: Ranks | None = None,
        keep: int | None = None,
        keep_every: int | None = None,
    ) -> None:
        check_policy(keep, keep_every)
        self.folder = Path(folder).absolute()
        self.keep = keep
        self.keep_every = keep_every
        self._ranks = ranks
        self._parts = Parts(
            model=model,
            optimizers=_as_list(optimizer),
            schedulers=_as_list(scheduler),
            scaler=scaler,
            loader=loader,
            extra=extra if extra is not None else {},
        )
        self._known: set[str] | None = None

    def save(self, step: int) -> None:
        """Write a checkpoint of the state after optimizer step `step`, and commit it.

        Raises:
            ShardfitError: it could not be written, or the folder holds checkpoints of another
                run; none is committed then.
        """
        from shardfit.train.shard import plan_of

        peers = find_peers(self._ranks)
        with patient():
            self._agree_on_folder(peers)
            slot = peers.first(lambda: self._choose_slot(step))
            made: list[Any] = []
            peers.each(lambda: made.append(collect(self._parts, peers, random_state)))
            plan = plan_of(self._parts.model)
            write(self.folder, slot, made[0], self._parts, peers, plan)
            peers.first(lambda: self._tidy(slot))
        _continued.add(self.folder)

    def resume(self, step: int | None = None, *, verify: bool = True) -> int | None:
        """Load the newest checkpoint, or that of `step`; returns its step, None where there is none.

        Everything that can be wrong is found before anything is touched.

        Args:
            step: the checkpoint of this step (ShardfitError where there is none). The next
                save is the newest from then on, whatever its step. None: the newest.
            verify: compare the digest of every file; False: only the sizes.
        """
        peers = find_peers(self._ranks)
        with patient():
            self._agree_on_folder(peers)
            found = peers.first(lambda: self._find(step))
            if found is None:
                _continued.add(self.folder)
                return None
            slot, manifest = found
            load(
                self.folder / slot.name,
                manifest,
                self._parts,
                peers,
                random_state=random_state,
                set_random_state=set_random_state,
                verify=verify,
            )
        _continued.add(self.folder)
        return slot.step

    def latest(self) -> int | None:
        """The step of the newest committed checkpoint; None where there is none. For any one rank."""
        committed = list_committed(self.folder)
        return committed[-1].step if committed else None

    def steps(self) -> list[int]:
        """The steps of the committed checkpoints, oldest first."""
        return [slot.step for slot in list_committed(self.folder)]

    def _find(self, step: int | None) -> tuple[Slot, Manifest] | None:
        committed = list_committed(self.folder)
        self._known = self._known or self._listing()
        wanted = [slot for slot in committed if step is None or slot.step == step]
        if wanted:
            return wanted[-1], Manifest.read(self.folder / wanted[-1].name)
        if step is None:
            return None
        raise ShardfitError(
            f"there is no committed checkpoint of step {step}",
            evidence=f"{self.folder} has {', '.join(str(s.step) for s in committed) or 'none'}",
            fix="give one of these steps, or none for the newest",
        )

    def _choose_slot(self, step: int) -> Slot:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ShardfitError("a step is a whole number, from 0", evidence=f"step={step!r}")
        listing = self._listing()
        self._known = listing if self._known is None else self._known
        if strangers := sorted(listing - self._known):
            raise ShardfitError(
                "another run saves to the same folder",
                evidence=f"{', '.join(strangers)} in {self.folder} is not of this run",
                fix="end one of them, and give each run a folder of its own",
            )
        committed = list_committed(self.folder)
        slot = next_slot(committed, step)
        if committed and slot.generation > committed[-1].generation and self.folder not in _continued:
            raise ShardfitError(
                "the folder holds a later checkpoint than the one to be saved",
                evidence=f"step {committed[-1].step} in {self.folder}; this run, which did not resume from "
                f"it, is at step {step}",
                fix="call resume() first, or save a new run to a folder of its own",
            )
        return slot

    def _tidy(self, slot: Slot) -> None:
        """After the commit: delete what has had its time. A failure here costs no checkpoint."""
        known = self._known if self._known is not None else set()
        known.add(slot.name)
        mine = [s for s in list_committed(self.folder) if s.name in known]
        try:
            for expired in choose_expired(mine, keep=self.keep, keep_every=self.keep_every):
                remove(self.folder, expired)
                known.discard(expired.name)
            for name in list_unfinished(self.folder):
                if name in known or ".deleting-" in name:
                    shutil.rmtree(self.folder / name)
                    known.discard(name)
        except OSError as error:
            warnings.warn(f"an old checkpoint could not be deleted: {error}", stacklevel=2)

    def _listing(self) -> set[str]:
        return {slot.name for slot in list_committed(self.folder)} | {
            name for name in list_unfinished(self.folder) if ".saving-" in name
        }

    def _agree_on_folder(self, peers: Peers) -> None:
        folders = peers.each(lambda: str(self.folder))
        if len(set(folders)) > 1:
            raise ShardfitError(
                "the ranks do not have the same checkpoint folder",
                evidence=", ".join(f"rank {rank}: {folder}" for rank, folder in enumerate(folders[:4])),
                fix="choose the name on rank 0 and broadcast it, or take it from the launcher's run id",
                code="SF728",
            )


def save_checkpoint(folder: str | os.PathLike[str], step: int, *, model: nn.Module, **parts: Any) -> None:
    """`Checkpointer(folder, model=model, **parts).save(step)`."""
    Checkpointer(folder, model=model, **parts).save(step)


def load_checkpoint(
    folder: str | os.PathLike[str],
    step: int | None = None,
    *,
    model: nn.Module,
    verify: bool = True,
    **parts: Any,
) -> int | None:
    """`Checkpointer(folder, model=model, **parts).resume(step)`; without an optimizer: weights only."""
    return Checkpointer(folder, model=model, **parts).resume(step, verify=verify)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
