"""Load: a checkpoint into live objects, all of it or nothing.

Everything that can be refused is refused before anything is touched: files against the
manifest, names, shapes, dtypes and groups against the live model and optimizer, on all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor

from shardfit.checkpoint.fit import Fit, find_fit
from shardfit.checkpoint.manifest import Manifest
from shardfit.checkpoint.peers import Peers
from shardfit.checkpoint.save import SHARED, Parts, own_file, quiet
from shardfit.checkpoint.state import load_optimizer_state
from shardfit.checkpoint.verify import find_damage
from shardfit.errors import EXIT_COULD_NOT_RUN, ShardfitError

NOT_LOADED = "the checkpoint could not be loaded; nothing was changed"


def load(
    place: Path,
    manifest: Manifest,
    parts: Parts,
    peers: Peers,
    *,
    random_state: Callable[[], dict[str, Any]],
    set_random_state: Callable[[dict[str, Any]], None],
    verify: bool = True,
) -> None:
    """Load the checkpoint in `place` into `parts`. Called on all ranks; all raise alike.

    Args:
        verify: compare the digest of every file (each rank takes a share of them). False:
            sizes only.

    Raises:
        ShardfitError: it is damaged (SF720) or does not fit, with everything that is wrong;
            nothing has been touched then.
    """
    peers.each(lambda: _check_files(place, manifest, peers, verify), NOT_LOADED)
    shared = peers.first(lambda: json.loads((place / SHARED).read_bytes()), NOT_LOADED)
    own = _read_own(place, manifest, peers)
    fit = peers.each_own(lambda: find_fit(manifest, parts, peers, shared, own, random_state), NOT_LOADED)
    if fit.extra_tensors:
        peers.each(lambda: _read(place, fit.extra_tensors, peers), NOT_LOADED)
    undo: list[Callable[[], None]] = []
    try:
        peers.each(lambda: _load_objects(fit, parts.loader, undo), NOT_LOADED)
    except ShardfitError:
        for step in reversed(undo):
            with contextlib.suppress(Exception):  # that of the part that has just refused
                step()
        raise
    try:
        peers.each(lambda: _read(place, fit.tensors, peers), NOT_LOADED)
        peers.each(lambda: _give_back(parts, fit), NOT_LOADED)
    except ShardfitError as error:
        raise ShardfitError(
            "the checkpoint was whole, but could not be read to its end",
            evidence=error.evidence or error.what,
            fix="don't train on: weights may be part old, part new; start the processes again",
            exit_status=EXIT_COULD_NOT_RUN,
        ) from error
    parts.extra.update(fit.values)
    set_random_state(fit.random)


def _check_files(place: Path, manifest: Manifest, peers: Peers, digests: bool) -> None:
    # Largest first, so that the shares are even.
    files = sorted(manifest.files, key=lambda file: (-file.size_bytes, file.name))[peers.rank :: peers.world]
    damage = find_damage(place, files, digests=digests)
    if damage:
        raise ShardfitError(
            "the checkpoint is damaged; nothing was loaded",
            evidence="; ".join(finding.evidence for finding in damage) + f" (in {place})",
            fix="restore these files from a copy, or resume from another checkpoint: resume(step=...)",
            code="SF720",
        )


def _read_own(place: Path, manifest: Manifest, peers: Peers) -> list[dict[str, Any]]:
    """Of each writing rank what it had of its own; where the ranks are the same, only this one's."""

    def read(rank: int) -> dict[str, Any]:
        data: dict[str, Any] = json.loads((place / own_file(rank)).read_bytes())
        return data

    if manifest.world == peers.world and manifest.mesh == peers.mesh:
        return peers.each_own(lambda: [read(peers.rank)], NOT_LOADED)
    return peers.first(lambda: [read(rank) for rank in range(manifest.world)], NOT_LOADED)


def _read(place: Path, tensors: dict[str, Tensor], peers: Peers) -> None:
    with quiet():
        dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(place), no_dist=peers.alone)


def _load_objects(fit: Fit, loader: Any, undo: list[Callable[[], None]]) -> None:
    for part, state in fit.steps:
        # The loader is last and has no way back: to ask some for their state starts their workers.
        if part is not loader:
            before = copy.deepcopy(part.state_dict())
            undo.append(partial(part.load_state_dict, before))
        part.load_state_dict(state)


def _give_back(parts: Parts, fit: Fit) -> None:
    for optimizer, match, state in zip(parts.optimizers, fit.matches, fit.states, strict=True):
        load_optimizer_state(optimizer, fit.param_names, groups=match.groups, **state)
    # The tensors are the live ones, filled in place; modules with hooks or extra state see them here.
    model = fit.model
    values = dict(model.raw)
    values.update({model.keys[name]: value for name, value in fit.objects.items()})
    parts.model.load_state_dict(values)
