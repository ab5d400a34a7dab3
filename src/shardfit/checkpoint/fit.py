"""Fit: hold a checkpoint against the live objects that are to take it, and touch none of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from shardfit.checkpoint.manifest import Manifest, SavedTensor
from shardfit.checkpoint.peers import Peers
from shardfit.checkpoint.save import Parts, is_stateful
from shardfit.checkpoint.state import (
    GroupMatch,
    ModelState,
    match_groups,
    model_state,
    name_params,
    regroup_scheduler,
    some,
)
from shardfit.checkpoint.values import decode, dtype_name, encode
from shardfit.errors import ShardfitError


@dataclass
class Fit:
    """A checkpoint that fits, about to be loaded.

    Attributes:
        tensors: live tensors of model and optimizers, and fresh ones, by saved name: read in place.
        extra_tensors: fresh ones that only `extra` will see.
        matches, states: per optimizer: hyper-parameters of its groups; its "state" by name, "loose" and
            "rest" as `optimizer_state` gave them.
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
    states: list[dict[str, Any]] = field(default_factory=list)
    steps: list[tuple[Any, Any]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    random: Any = None


def find_fit(
    manifest: Manifest,
    parts: Parts,
    peers: Peers,
    shared: dict[str, Any],
    own: list[dict[str, Any]],
    random_state: Callable[[], dict[str, Any]],
) -> Fit:
    """What is loaded where.

    Args:
        shared: the content of state.json.
        own: of each rank that saved, what it had of its own; or of this one only.
        random_state: reads this rank's random state.

    Raises:
        ShardfitError: something does not fit; with everything that does not.
    """
    problems: list[str] = []
    saved = {tensor.name: tensor for tensor in manifest.tensors}
    model = model_state(parts.model)
    renamed = _match_model(model, saved, manifest.aliases, problems)
    fit = Fit(
        model,
        {param: renamed.get(name, name) for param, name in name_params(parts.model).items()},
        {},
        tensors={
            f"model.{renamed[name]}": tensor for name, tensor in model.tensors.items() if name in renamed
        },
    )
    fit.objects = decode(shared["model"], _reader({}, saved, fit))
    if set(fit.objects) != set(model.objects):
        problems.append(f"extra state of modules: saved {sorted(fit.objects)}, now {sorted(model.objects)}")
    _prepare_optimizers(parts, shared, saved, fit, problems)
    _prepare_objects(parts, shared, saved, fit, problems)
    _prepare_own(parts, peers, manifest, own, random_state, fit, problems)
    if problems:
        raise ShardfitError(
            f"the checkpoint does not fit; nothing was loaded ({len(problems)} "
            f"problem{'s' if len(problems) > 1 else ''})",
            evidence=some(problems, limit=20, between="; "),
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
    return fit


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
    parts: Parts, shared: dict[str, Any], saved: dict[str, SavedTensor], fit: Fit, problems: list[str]
) -> None:
    if not parts.optimizers:
        return
    if len(shared["optimizer"]) != len(parts.optimizers):
        there = len(shared["optimizer"])
        problems.append(
            f"{len(parts.optimizers)} optimizers given, {there} in it" if there else _absent("optimizer")
        )
        return
    by_name = {name: param for param, name in fit.param_names.items()}
    for optimizer, data in zip(parts.optimizers, shared["optimizer"], strict=True):
        match = match_groups(optimizer, fit.param_names, decode(data["groups"]))
        problems.extend(match.problems)
        state: dict[str, dict[str, Any]] = {}
        for name, value in data["state"].items():
            if (param := by_name.get(name)) is None:
                continue  # match_groups has said so

            def target(reference: dict[str, Any], param: Tensor = param, name: str = name) -> Tensor:
                (kind, path), *_ = reference.items()
                live = optimizer.state.get(param, {}).get(path.removeprefix(f"optimizer.state.{name}."))  # noqa: B023
                tensor = _state_target(param, saved[path], live, sharded=kind == "!sharded")
                fit.tensors[path] = tensor
                return tensor

            state[name] = decode(value, target)
        fit.matches.append(match)
        others = {key: decode(data[key], _reader({}, saved, fit)) for key in ("loose", "rest")}
        fit.states.append({"state": state, **others})


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
    parts: Parts, shared: dict[str, Any], saved: dict[str, SavedTensor], fit: Fit, problems: list[str]
) -> None:
    if parts.schedulers and len(shared["scheduler"]) != len(parts.schedulers):
        there = len(shared["scheduler"])
        problems.append(
            f"{len(parts.schedulers)} schedulers given, {there} in it" if there else _absent("scheduler")
        )
    else:
        for scheduler, data in zip(parts.schedulers, shared["scheduler"], strict=False):
            state = decode(data, _reader({}, saved, fit))
            for optimizer, match in zip(parts.optimizers, fit.matches, strict=False):
                if getattr(scheduler, "optimizer", None) is optimizer:
                    state = regroup_scheduler(state, match)
            fit.steps.append((scheduler, state))
    if parts.scaler is not None:
        if "scaler" in shared:
            fit.steps.append((parts.scaler, decode(shared["scaler"], _reader({}, saved, fit))))
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
        state = decode(shared["extra"][name], _reader(live, saved, fit))
        if is_stateful(value):
            fit.steps.append((value, state))
        else:
            fit.values[name] = state


def _reader(
    live: dict[str, Tensor], saved: dict[str, SavedTensor], fit: Fit
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
        fit.extra_tensors[path] = tensor
        return tensor

    return target


def _prepare_own(
    parts: Parts,
    peers: Peers,
    manifest: Manifest,
    own: list[dict[str, Any]],
    random_state: Callable[[], dict[str, Any]],
    fit: Fit,
    problems: list[str],
) -> None:
    same_ranks = manifest.data_world == peers.data_world
    mine = own[0] if len(own) == 1 else next((o for o in own if o["data_rank"] == peers.data_rank), None)
    fit.random = random_state()
    doubtful = []
    for key in sorted(set(fit.random) | set(own[0]["random"])):
        states = [o["random"].get(key) for o in own]
        if all(state == states[0] for state in states):
            chosen = states[0]
        else:
            chosen = mine["random"].get(key) if mine is not None else None
            if not same_ranks:
                doubtful.append(key)
        if chosen is not None:
            fit.random[key] = decode(chosen)
    # Python's and numpy's are often never seeded, and differ for that alone.
    if {"torch", "cuda"} & set(doubtful) and peers.is_first:
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
        fit.steps.append((parts.loader, decode(mine["loader"])))
    elif all(state == loaders[0] for state in loaders):
        fit.steps.append((parts.loader, decode(loaders[0])))
    else:
        problems.append(
            f"the loader's position differed between the {manifest.data_world} data ranks that saved, "
            f"and there are {peers.data_world} now"
        )


def _absent(part: str) -> str:
    return f"{part} given, but not in the checkpoint"
