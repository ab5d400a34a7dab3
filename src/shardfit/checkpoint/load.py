"""Load: a checkpoint into live objects, all of it or nothing.

Everything that can be refused is refused before anything is touched: files against the
manifest, names, shapes, dtypes and groups against the live model and optimizer, on all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from shardfit.checkpoint.manifest import Manifest, SavedTensor
from shardfit.checkpoint.peers import Peers
from shardfit.checkpoint.save import SHARED, Parts, is_stateful, own_file, quiet
from shardfit.checkpoint.state import (
    GroupMatch,
    ModelState,
    load_optimizer_state,
    match_groups,
    model_state,
    name_params,
    regroup_scheduler,
    some,
)
from shardfit.checkpoint.values import decode, dtype_name, encode
from shardfit.checkpoint.verify import find_damage
from shardfit.errors import EXIT_COULD_NOT_RUN, ShardfitError

NOT_LOADED = "the checkpoint could not be loaded; nothing was changed"


@dataclass
class _Ready:
    """A checkpoint that fits, about to be loaded.

    Attributes:
        tensors: live tensors of model and optimizers, and fresh ones, by saved name: read in place.
        extra_tensors: fresh ones that only `extra` will see.
        matches, states: per optimizer: hyper-parameters of its groups; state by name.
        steps: (object, its state), in the order in which they are loaded.
        values: of `extra`, by name, that are no objects.
        random: this rank's random state.
    """

    model: ModelState
    param_names: dict[Tensor, str]
    objects: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    extra_tensors: dict[str, Tensor] = field(default_factory=dict)
    matches: list[GroupMatch] = field(default_factory=list)
    states: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    steps: list[tuple[Any, Any]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    random: Any = None


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
    ready = peers.each_own(lambda: _prepare(manifest, parts, peers, shared, own, random_state), NOT_LOADED)
    if ready.extra_tensors:
        peers.each(lambda: _read(place, ready.extra_tensors, peers), NOT_LOADED)
    undo: list[Callable[[], None]] = []
    try:
        peers.each(lambda: _load_objects(ready, parts.loader, undo), NOT_LOADED)
    except ShardfitError:
        for step in reversed(undo):
            with contextlib.suppress(Exception):  # that of the part that has just refused
                step()
        raise
    try:
        peers.each(lambda: _read(place, ready.tensors, peers), NOT_LOADED)
        peers.each(lambda: _give_back(parts, ready), NOT_LOADED)
    except ShardfitError as error:
        raise ShardfitError(
            "the checkpoint was whole, but could not be read to its end",
            evidence=error.evidence or error.what,
            fix="don't train on: weights may be part old, part new; start the processes again",
            exit_status=EXIT_COULD_NOT_RUN,
        ) from error
    parts.extra.update(ready.values)
    set_random_state(ready.random)


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


def _prepare(
    manifest: Manifest,
    parts: Parts,
    peers: Peers,
    shared: dict[str, Any],
    own: list[dict[str, Any]],
    random_state: Callable[[], dict[str, Any]],
) -> _Ready:
    problems: list[str] = []
    saved = {tensor.name: tensor for tensor in manifest.tensors}
    model = model_state(parts.model)
    renamed = _match_model(model, saved, manifest.aliases, problems)
    ready = _Ready(
        model,
        {param: renamed.get(name, name) for param, name in name_params(parts.model).items()},
        {},
        tensors={
            f"model.{renamed[name]}": tensor for name, tensor in model.tensors.items() if name in renamed
        },
    )
    ready.objects = decode(shared["model"], _reader({}, saved, ready))
    if set(ready.objects) != set(model.objects):
        problems.append(f"extra state of modules: saved {sorted(ready.objects)}, now {sorted(model.objects)}")
    _prepare_optimizers(parts, shared, saved, ready, problems)
    _prepare_objects(parts, shared, saved, ready, problems)
    _prepare_own(parts, peers, manifest, own, random_state, ready, problems)
    if problems:
        raise ShardfitError(
            f"the checkpoint does not fit; nothing was loaded ({len(problems)} "
            f"problem{'s' if len(problems) > 1 else ''})",
            evidence="; ".join(problems),
            fix="build the model, optimizer and the rest as the run that saved it did",
            code="SF708" if all("not in the checkpoint" in p for p in problems) else None,
        )
    if peers.rank == 0 and parts.optimizers:
        left = sorted(set(manifest.parts) - set(parts.names()))
        if left:
            warnings.warn(
                f"the checkpoint of step {manifest.step} also holds {', '.join(left)}, which nobody takes: "
                "give it to the checkpointer, or it starts anew",
                stacklevel=2,
            )
    return ready


def _match_model(
    model: ModelState, saved: dict[str, SavedTensor], saved_aliases: dict[str, str], problems: list[str]
) -> dict[str, str]:
    """For each live name the saved one (they differ where another of a tie's names comes first)."""
    aliases = {a.removeprefix("model."): n.removeprefix("model.") for a, n in saved_aliases.items()}
    stored = {name.removeprefix("model.") for name in saved if name.startswith("model.")}
    known, live = stored | set(aliases), set(model.tensors) | set(model.aliases)
    if missing := sorted(live - known):
        problems.append(f"{len(missing)} tensors of the model are missing in it: {some(missing)}")
    if unexpected := sorted(known - live):
        problems.append(f"it has {len(unexpected)} tensors that the model has not: {some(unexpected)}")
    renamed: dict[str, str] = {}
    for name in sorted(live & known):
        first, source = model.aliases.get(name, name), aliases.get(name, name)
        if renamed.setdefault(first, source) != source:
            problems.append(f"{first} and {name} are tied now, and were not when it was saved")
    taken: dict[str, str] = {}
    for first, source in renamed.items():
        if taken.setdefault(source, first) != first:
            problems.append(f"{taken[source]} and {first} were tied when it was saved, and are not now")
        problems.extend(_misfit(first, model.tensors[first], saved[f"model.{source}"]))
    return renamed


def _misfit(name: str, live: Tensor, saved: SavedTensor) -> list[str]:
    if tuple(live.shape) != saved.shape:
        return [f"{name}: shape {saved.shape} in it, {tuple(live.shape)} in the model"]
    if dtype_name(live.dtype) != saved.dtype:
        return [f"{name}: {saved.dtype} in it, {dtype_name(live.dtype)} in the model"]
    return []


def _prepare_optimizers(
    parts: Parts, shared: dict[str, Any], saved: dict[str, SavedTensor], ready: _Ready, problems: list[str]
) -> None:
    if not parts.optimizers:
        return
    if len(shared["optimizer"]) != len(parts.optimizers):
        there = len(shared["optimizer"])
        problems.append(
            f"{len(parts.optimizers)} optimizers given, {there} in it" if there else _absent("optimizer")
        )
        return
    by_name = {name: param for param, name in ready.param_names.items()}
    for optimizer, data in zip(parts.optimizers, shared["optimizer"], strict=True):
        match = match_groups(optimizer, ready.param_names, decode(data["groups"]))
        problems.extend(match.problems)
        state: dict[str, dict[str, Any]] = {}
        for name, value in data["state"].items():
            if (param := by_name.get(name)) is None:
                continue  # match_groups has said so

            def target(reference: dict[str, Any], param: Tensor = param, name: str = name) -> Tensor:
                (kind, path), *_ = reference.items()
                live = optimizer.state.get(param, {}).get(path.removeprefix(f"optimizer.state.{name}."))  # noqa: B023
                tensor = _state_target(param, saved[path], live, sharded=kind == "!sharded")
                ready.tensors[path] = tensor
                return tensor

            state[name] = decode(value, target)
        ready.matches.append(match)
        ready.states.append(state)


def _state_target(param: Tensor, saved: SavedTensor, live: Any, *, sharded: bool) -> Tensor:
    """Where a tensor of a parameter's state is read to: laid out as the optimizer would."""
    dtype: torch.dtype = getattr(torch, saved.dtype)
    if isinstance(live, Tensor) and tuple(live.shape) == saved.shape and live.dtype == dtype:
        return live.detach()
    param = param.detach()
    if tuple(param.shape) == saved.shape:
        return torch.empty_like(param, dtype=dtype)
    plain = torch.empty(saved.shape, dtype=dtype, device=param.device)
    if sharded and isinstance(param, DTensor):
        mesh = param.device_mesh
        return DTensor.from_local(plain, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return plain


def _prepare_objects(
    parts: Parts, shared: dict[str, Any], saved: dict[str, SavedTensor], ready: _Ready, problems: list[str]
) -> None:
    if parts.schedulers and len(shared["scheduler"]) != len(parts.schedulers):
        there = len(shared["scheduler"])
        problems.append(
            f"{len(parts.schedulers)} schedulers given, {there} in it" if there else _absent("scheduler")
        )
    else:
        for scheduler, data in zip(parts.schedulers, shared["scheduler"], strict=False):
            state = decode(data, _reader({}, saved, ready))
            for optimizer, match in zip(parts.optimizers, ready.matches, strict=False):
                if getattr(scheduler, "optimizer", None) is optimizer:
                    state = regroup_scheduler(state, match)
            ready.steps.append((scheduler, state))
    if parts.scaler is not None:
        if "scaler" in shared:
            ready.steps.append((parts.scaler, decode(shared["scaler"], _reader({}, saved, ready))))
        else:
            problems.append(_absent("scaler"))
    for name, value in parts.extra.items():
        if name not in shared["extra"]:
            problems.append(_absent(f"extra {name!r}"))
            continue
        live: dict[str, Tensor] = {}

        def note(path: str, tensor: Tensor, live: dict[str, Tensor] = live) -> Any:
            live[path] = tensor
            return path

        encode(value.state_dict() if is_stateful(value) else value, f"extra.{name}", note)
        state = decode(shared["extra"][name], _reader(live, saved, ready))
        if is_stateful(value):
            ready.steps.append((value, state))
        else:
            ready.values[name] = state


def _reader(
    live: dict[str, Tensor], saved: dict[str, SavedTensor], ready: _Ready
) -> Callable[[dict[str, Any]], Tensor]:
    def target(reference: dict[str, Any]) -> Tensor:
        path = next(iter(reference.values()))
        entry = saved[path]
        dtype: torch.dtype = getattr(torch, entry.dtype)
        like = live.get(path)
        if like is not None and tuple(like.shape) == entry.shape:
            tensor = torch.empty_like(like.detach(), dtype=dtype)
        else:
            tensor = torch.empty(entry.shape, dtype=dtype)
        ready.extra_tensors[path] = tensor
        return tensor

    return target


def _prepare_own(
    parts: Parts,
    peers: Peers,
    manifest: Manifest,
    own: list[dict[str, Any]],
    random_state: Callable[[], dict[str, Any]],
    ready: _Ready,
    problems: list[str],
) -> None:
    same_ranks = manifest.data_world == peers.data_world
    mine = own[0] if len(own) == 1 else next((o for o in own if o["data_rank"] == peers.data_rank), None)
    ready.random = random_state()
    doubtful = []
    for key in ready.random:
        states = [o["random"].get(key) for o in own]
        if all(state == states[0] for state in states):
            chosen = states[0]
        else:
            chosen = mine["random"].get(key) if mine is not None else None
            if not same_ranks:
                doubtful.append(key)
        if chosen is not None:
            ready.random[key] = decode(chosen)
    if doubtful and peers.rank == 0:
        warnings.warn(
            f"random states ({', '.join(doubtful)}) differed between the {manifest.data_world} data ranks "
            f"that saved, and there are {peers.data_world} now: each rank takes that of its number, those "
            "beyond keep their own; draws are not those of the saved run",
            stacklevel=2,
        )
    if parts.loader is None:
        return
    loaders = [o.get("loader") for o in own]
    if loaders[0] is None:
        problems.append(_absent("loader"))
    elif same_ranks and mine is not None:
        ready.steps.append((parts.loader, decode(mine["loader"])))
    elif all(state == loaders[0] for state in loaders):
        ready.steps.append((parts.loader, decode(loaders[0])))
    else:
        problems.append(
            f"the loader's position differed between the {manifest.data_world} data ranks that saved, "
            f"and there are {peers.data_world} now"
        )


def _absent(part: str) -> str:
    return f"{part} given, but not in the checkpoint"


def _read(place: Path, tensors: dict[str, Tensor], peers: Peers) -> None:
    with quiet():
        dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(place), no_dist=peers.alone)


def _load_objects(ready: _Ready, loader: Any, undo: list[Callable[[], None]]) -> None:
    for part, state in ready.steps:
        # The loader is last and has no way back: to ask some for their state starts their workers.
        if part is not loader:
            before = copy.deepcopy(part.state_dict())
            undo.append(partial(part.load_state_dict, before))
        part.load_state_dict(state)


def _give_back(parts: Parts, ready: _Ready) -> None:
    for optimizer, match, state in zip(parts.optimizers, ready.matches, ready.states, strict=True):
        load_optimizer_state(optimizer, ready.param_names, groups=match.groups, state=state)
    # The tensors are the live ones, filled in place; modules with hooks or extra state see them here.
    model = ready.model
    values = dict(model.raw)
    values.update({model.keys[name]: value for name, value in ready.objects.items()})
    parts.model.load_state_dict(values)
