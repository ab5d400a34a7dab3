"""Checkpointer: save, resume, latest."""

from __future__ import annotations

import operator
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardfit.checkpoint.claim import claim_of
from shardfit.checkpoint.layout import list_committed
from shardfit.checkpoint.load import NOT_LOADED, load
from shardfit.checkpoint.manifest import Manifest
from shardfit.checkpoint.peers import Peers, find_peers
from shardfit.checkpoint.retain import check_policy
from shardfit.checkpoint.save import NOT_SAVED, Parts, collect, write
from shardfit.errors import ShardfitError
from shardfit.train.launch import Ranks, patient
from shardfit.train.random import random_state, set_random_state

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


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

    def save(self, step: int) -> None:
        """Write a checkpoint of the state after optimizer step `step`, and commit it.

        Raises:
            ShardfitError: it could not be written, or the folder holds checkpoints of another
                run; none is committed then.
        """
        from shardfit.train.shard import plan_of

        peers = find_peers(self._ranks)
        claim = claim_of(self.folder)
        with patient():
            step = peers.each_own(lambda: _whole_number(step), NOT_SAVED)
            self._agree(peers, step, NOT_SAVED)
            content = peers.each_own(lambda: collect(self._parts, peers, random_state), NOT_SAVED)
            slot, name = peers.first(lambda: claim.begin(step), NOT_SAVED)
            try:
                write(self.folder, slot, name, content, self._parts, peers, plan_of(self._parts.model))
            except ShardfitError:
                # All ranks have ended: none writes any more.
                if peers.is_first:
                    shutil.rmtree(self.folder / name, ignore_errors=True)
                raise
            peers.first(
                lambda: claim.settle(slot, keep=self.keep, keep_every=self.keep_every),
                "the checkpoint is saved, but not all old ones could be deleted",
            )

    def resume(self, step: int | None = None, *, verify: bool = True) -> int | None:
        """Load the newest checkpoint, or that of `step`; returns its step, None where there is none.

        Everything that can be wrong is found before anything is touched.

        Args:
            step: the checkpoint of this step (ShardfitError where there is none). The next
                save is the newest from then on, whatever its step. None: the newest.
            verify: compare the digest of every file; False: only the sizes.
        """
        peers = find_peers(self._ranks)
        claim = claim_of(self.folder)
        with patient():
            self._agree(peers, step, NOT_LOADED)
            slot = peers.first(lambda: claim.find(step), NOT_LOADED)
            if slot is None:
                claim.continued = True
                return None
            place = self.folder / slot.name
            load(
                place,
                peers.first(lambda: Manifest.read(place), NOT_LOADED),
                self._parts,
                peers,
                random_state=random_state,
                set_random_state=set_random_state,
                verify=verify,
            )
        claim.continued = True
        return slot.step

    def latest(self) -> int | None:
        """The step of the newest committed checkpoint; None where there is none. For any one rank."""
        committed = list_committed(self.folder)
        return committed[-1].step if committed else None

    def steps(self) -> list[int]:
        """The steps of the committed checkpoints, oldest first."""
        return [slot.step for slot in list_committed(self.folder)]

    def _agree(self, peers: Peers, step: int | None, what: str) -> None:
        """All ranks are at the same call, before any of them acts."""
        calls = peers.each(lambda: (str(self.folder), step), what)
        for name, values in zip(("folder", "step"), zip(*calls, strict=True), strict=True):
            if len(set(values)) > 1:
                raise ShardfitError(
                    f"the ranks do not have the same checkpoint {name}",
                    evidence=", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values[:4])),
                    fix="choose it on rank 0 and broadcast it, or take it from what all ranks share",
                    code="SF728" if name == "folder" else None,
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


def _whole_number(step: int) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise ShardfitError("a step is a whole number, from 0", evidence=f"step={step!r}")
    return number


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
