"""Save: one checkpoint written by all ranks, and committed by the first.

Tensors go through torch.distributed.checkpoint, each rank its own shards. Everything else is
JSON: `state.json` for what all ranks share, `rank-00000.json` for what each has of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from shardfit import __version__
from shardfit.checkpoint.layout import MANIFEST, Slot, commit, sync, write_file
from shardfit.checkpoint.manifest import Manifest, SavedFile, SavedTensor, measure_file
from shardfit.checkpoint.peers import Peers
from shardfit.checkpoint.state import model_state, name_params, optimizer_state
from shardfit.checkpoint.values import dtype_name, encode
from shardfit.errors import ShardfitError
from shardfit.plan import Plan

SHARED = "state.json"
PLAN = "plan.json"
NOT_SAVED = "the checkpoint could not be saved; those before it are as they were"


def own_file(rank: int) -> str:
    """The name of a rank's own file."""
    return f"rank-{rank:05d}.json"


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a checkpoint is made of, live.

    Attributes:
        model: its parameters and persistent buffers.
        optimizers, schedulers: none, one or several.
        scaler, loader: objects with state_dict and load_state_dict. None: there is none.
        extra: such objects, or plain values, by name.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer] = ()
    schedulers: Sequence[Any] = ()
    scaler: Any = None
    loader: Any = None
    extra: dict[str, Any] = field(default_factory=dict)

    def names(self) -> tuple[str, ...]:
        """The names of those that are there."""
        named = {
            "optimizer": self.optimizers,
            "scheduler": self.schedulers,
            "scaler": self.scaler is not None,
            "loader": self.loader is not None,
        }
        return ("model", *(n for n, there in named.items() if there), *(f"extra.{n}" for n in self.extra))


@dataclass
class Content:
    """A checkpoint about to be written: tensors by name, and JSON-able state."""

    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    shared: dict[str, Any]
    own: dict[str, Any]


def collect(parts: Parts, peers: Peers, random_state: Callable[[], Any]) -> Content:
    """Read the state of all parts on this rank; nothing is copied yet, nothing written.

    Raises:
        ShardfitError: state that can't be stored, with its name.
    """
    model = model_state(parts.model)
    names = name_params(parts.model)
    content = Content({}, {}, {}, {})

    def put(path: str, value: Tensor) -> Any:
        if not isinstance(value, DTensor) and value.ndim == 0:
            return None
        if path in content.tensors:
            raise ShardfitError("two tensors of the state have one name", evidence=path, fix="rename one")
        content.tensors[path] = value.detach()
        return {"!sharded" if isinstance(value, DTensor) else "!stored": path}

    for name, tensor in model.tensors.items():
        content.tensors[f"model.{name}"] = tensor
    content.aliases = {f"model.{alias}": f"model.{name}" for alias, name in model.aliases.items()}
    shared: dict[str, Any] = {
        "model": encode(model.objects, "module", put),
        "optimizer": [encode(optimizer_state(o, names), "optimizer", put) for o in parts.optimizers],
        "scheduler": [encode(s.state_dict(), f"scheduler.{i}", put) for i, s in enumerate(parts.schedulers)],
        "extra": {
            name: encode(value.state_dict() if is_stateful(value) else value, f"extra.{name}", put)
            for name, value in parts.extra.items()
        },
    }
    if parts.scaler is not None:
        shared["scaler"] = encode(parts.scaler.state_dict(), "scaler", put)
    content.shared = shared
    content.own = {"data_rank": peers.data_rank, "random": encode(random_state(), "random")}
    if parts.loader is not None:
        content.own["loader"] = encode(parts.loader.state_dict(), "loader")
    return content


def write(
    folder: Path,
    slot: Slot,
    name: str,
    content: Content,
    parts: Parts,
    peers: Peers,
    plan: Plan | None,
) -> Manifest:
    """Write a checkpoint into `folder / name` and commit it. On all ranks; all raise alike.

    Raises:
        ShardfitError: it could not be written; nothing is committed then, and what had been
            written is deleted.
    """
    place = folder / name
    peers.each(lambda: _write_tensors(place, content.tensors, peers), NOT_SAVED)
    written = peers.each(lambda: _write_rest(place, content, peers, plan), NOT_SAVED)
    files = [file for of_rank in written for file in of_rank]
    return peers.first(lambda: _commit(folder, name, slot, content, parts, peers, plan, files), NOT_SAVED)


def is_stateful(value: Any) -> bool:
    """True where it has state_dict and load_state_dict."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warning that there is one process only: it is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _reduced(value: Tensor) -> Tensor:
    """A DTensor that is still to be summed (or the like) over ranks, summed; others as they are."""
    if not isinstance(value, DTensor) or not any(p.is_partial() for p in value.placements):
        return value
    return value.redistribute(placements=[Replicate() if p.is_partial() else p for p in value.placements])


def _write_tensors(place: Path, tensors: dict[str, Tensor], peers: Peers) -> None:
    # More threads than one would lose a writer's error (SF722).
    writer = dcp.FileSystemWriter(place, single_file_per_rank=True, sync_files=True, thread_count=1)
    with quiet():
        dcp.save(
            {name: _reduced(value) for name, value in tensors.items()},
            storage_writer=writer,
            no_dist=peers.alone,
        )


def _write_rest(place: Path, content: Content, peers: Peers, plan: Plan | None) -> list[SavedFile]:
    write_file(place / own_file(peers.rank), _to_json(content.own))
    if peers.rank == 0:
        write_file(place / SHARED, _to_json(content.shared))
        if plan is not None:
            write_file(place / PLAN, json.dumps(plan.to_dict(), indent=2).encode())
    names = [n for n in os.listdir(place) if _is_own(n, peers.rank)]
    for name in names:
        sync(place / name)
    return [measure_file(place / name) for name in sorted(names)]


def _is_own(name: str, rank: int) -> bool:
    # DCP calls its files `__<rank>_<number>.distcp`, and the index, by rank 0, `.metadata`.
    return (
        name.startswith(f"__{rank}_")
        or name == own_file(rank)
        or (rank == 0 and name in (SHARED, PLAN, ".metadata"))
    )


def _commit(
    folder: Path,
    name: str,
    slot: Slot,
    content: Content,
    parts: Parts,
    peers: Peers,
    plan: Plan | None,
    files: list[SavedFile],
) -> Manifest:
    place = folder / name
    there = {n: (place / n).stat().st_size for n in os.listdir(place)}
    if lost := [f.name for f in files if there.get(f.name) != f.size_bytes]:
        raise ShardfitError(
            "rank 0 does not see what other ranks have written",
            evidence=f"{', '.join(sorted(lost))} in {place}",
            fix="save to storage that all hosts share",
        )
    manifest = Manifest(
        step=slot.step,
        world=peers.world,
        data_world=peers.data_world,
        mesh=peers.mesh,
        plan_digest=plan.digest() if plan is not None else None,
        torch_version=torch.__version__,
        shardfit_version=__version__,
        parts=parts.names(),
        tensors=tuple(
            SavedTensor(key, tuple(tensor.shape), dtype_name(tensor.dtype))
            for key, tensor in sorted(content.tensors.items())
        ),
        aliases=content.aliases,
        files=tuple(sorted(files, key=lambda file: file.name)),
    )
    sync(place)
    manifest.write(place)
    assert (place / MANIFEST).is_file()
    commit(folder, name, slot)
    return manifest


def _to_json(value: Any) -> bytes:
    return json.dumps(value).encode()
