"""State: the tensors of a model and of its optimizers, by the parameters' names.

Names are what a checkpoint keeps of a run's structure: not the order of parameters or
groups, not the units, not the mesh. So it can be loaded where those are different.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardfit import _torch
from shardfit.errors import ShardfitError

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
# How an optimizer computes, not what: these stay as the running script chose them.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
_MEMBERS = ("params", "param_names")
# Lists over the optimizer's groups in the state of torch's schedulers.
_PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "base_momentums", "max_momentums")


@dataclass(frozen=True)
class ModelState:
    """A model's persistent state.

    Attributes:
        raw: `model.state_dict()` with the live tensors.
        tensors: each live tensor once, by its first name without wrappers' prefixes.
        aliases: other names of tied tensors, and the first name.
        objects: what modules gave as extra state, by name; not a tensor.
        keys: the key in `raw` of each name.
    """

    raw: dict[str, Any]
    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    objects: dict[str, Any]
    keys: dict[str, str]


def model_state(model: nn.Module) -> ModelState:
    """The parameters and persistent buffers of `model`, live, resharded where it is sharded.

    Raises:
        ShardfitError: a tensor is still on the meta device, or deferred (SF201).
    """
    raw = model.state_dict(keep_vars=True)
    state = ModelState(raw, {}, {}, {}, {})
    first: dict[int, str] = {}
    unwritten = []
    for key, value in raw.items():
        name = clean_name(key, model)
        state.keys[name] = key
        if not isinstance(value, Tensor):
            state.objects[name] = value
        elif id(value) in first:
            state.aliases[name] = first[id(value)]
        else:
            first[id(value)] = name
            state.tensors[name] = value.detach()
            if not _torch.has_values(value):
                unwritten.append(name)
    if unwritten:
        raise ShardfitError(
            "the model has no weights yet",
            evidence=f"{len(unwritten)} tensors without values: {some(unwritten)}",
            fix="shard (or materialise) the model before its checkpointer saves or resumes",
            code="SF201",
        )
    return state


def clean_name(key: str, model: nn.Module) -> str:
    """A name without what compile, activation checkpointing and DDP put into it."""
    for wrapper in _WRAPPERS:
        key = key.replace(wrapper, "")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        key = key.removeprefix("module.")
    return key


def name_params(model: nn.Module) -> dict[Tensor, str]:
    """The name of each parameter; the first one where it is tied."""
    return {param: clean_name(name, model) for name, param in model.named_parameters()}


def optimizer_state(optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> dict[str, Any]:
    """`{"groups": [{..., "params": [name, ...]}, ...], "state": {name: {key: value}}}`, live.

    "loose" is state that belongs to no parameter, "rest" what else the optimizer's state_dict holds.
    A parameter that has not been updated yet has no state, and gets none by being asked.

    Raises:
        ShardfitError: a parameter that the model does not have (SF501), or state that holds
            one rank's part in a plain tensor.
    """
    check_members(optimizer, names)
    packed = optimizer.state_dict()
    numbered = _number_params(optimizer, packed)
    state, loose = {}, {}
    for number, value in packed["state"].items():
        if (param := numbered.get(number)) is None:
            loose[number] = value
            continue
        _refuse_local_parts(value, param, names[param])
        state[names[param]] = value
    groups = [
        {
            **{key: value for key, value in group.items() if key not in _MEMBERS},
            "params": [names[numbered[number]] for number in group["params"]],
        }
        for group in packed["param_groups"]
    ]
    rest = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
    return {"groups": groups, "state": state, "loose": loose, "rest": rest}


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    names: dict[Tensor, str],
    *,
    groups: Sequence[dict[str, Any]],
    state: dict[str, dict[str, Any]],
    loose: dict[Any, Any],
    rest: dict[str, Any],
) -> None:
    """Give `optimizer` its state and hyper-parameters back.

    Args:
        groups: as `match_groups` found them.
        state: of each parameter by name; where a name is absent the parameter has none.
        loose, rest: see `optimizer_state`.
    """
    packed = optimizer.state_dict()
    numbered = _number_params(optimizer, packed)
    merged = [{**new, **_members(old)} for old, new in zip(packed["param_groups"], groups, strict=True)]
    numbered_state = {
        number: state[names[param]] for number, param in numbered.items() if names[param] in state
    }
    optimizer.load_state_dict(
        {**packed, **rest, "state": {**numbered_state, **loose}, "param_groups": merged}
    )
    # torch casts state to the parameter's dtype; state that was kept in another stays so.
    for number, value in numbered_state.items():
        live = optimizer.state[numbered[number]]
        for key, item in value.items():
            if isinstance(item, Tensor) and key != "step" and live[key].dtype != item.dtype:
                live[key] = item.to(live[key].device)


@dataclass(frozen=True)
class GroupMatch:
    """How the groups of a live optimizer stand to saved ones.

    Attributes:
        groups: hyper-parameters of each live group.
        sources: for each live group the number of a saved group with these values.
        num_saved: number of saved groups.
        problems: what does not fit, one sentence each.
    """

    groups: list[dict[str, Any]]
    sources: list[int]
    num_saved: int
    problems: list[str]


def match_groups(
    optimizer: torch.optim.Optimizer, names: dict[Tensor, str], saved: Sequence[dict[str, Any]]
) -> GroupMatch:
    """The saved hyper-parameters for each group of `optimizer`, and what does not fit.

    Groups are matched by their parameters: their order, and how they are divided, may differ
    as long as all parameters of a group were saved with the same values.
    """
    check_members(optimizer, names)
    home = {name: number for number, group in enumerate(saved) for name in group["params"]}
    match = GroupMatch([], [], len(saved), [])
    for index, live in enumerate(optimizer.param_groups):
        members = [names[param] for param in live["params"]]
        numbers = sorted({home[name] for name in members if name in home})
        values: dict[str, Any] = {key: value for key, value in live.items() if key not in _MEMBERS}
        for number in numbers:
            source, first = saved[number], saved[numbers[0]]
            for key, value in source.items():
                if key in _MEMBERS or key in IMPLEMENTATION:
                    continue
                if not _same(value, first.get(key)):
                    match.problems.append(
                        f"group {index} of the optimizer: {key} was {first.get(key)!r} for "
                        f"{first['params'][0]!r} and {value!r} for {source['params'][0]!r}"
                    )
                values[key] = _held_alike(value, live.get(key))
        match.groups.append(values)
        match.sources.append(numbers[0] if numbers else index)
    present = {names[param] for group in optimizer.param_groups for param in group["params"]}
    if missing := sorted(present - set(home)):
        match.problems.append(f"not in the saved optimizer: {some(missing)}")
    if unexpected := sorted(set(home) - present):
        match.problems.append(f"saved with the optimizer, which has not got them now: {some(unexpected)}")
    return match


def regroup_scheduler(state: dict[str, Any], match: GroupMatch) -> dict[str, Any]:
    """A scheduler's state with its lists over groups in the order of the live groups."""
    changed = dict(state)
    for key, value in state.items():
        if key in _PER_GROUP and isinstance(value, list) and len(value) == match.num_saved:
            changed[key] = [value[number] for number in match.sources]
        elif key == "_schedulers":  # of ChainedScheduler and SequentialLR
            changed[key] = [regroup_scheduler(inner, match) for inner in value]
    return changed


def check_members(optimizer: torch.optim.Optimizer, names: dict[Tensor, str]) -> None:
    """ShardfitError (SF501) where the optimizer holds parameters that the model does not use."""
    strangers = [param for group in optimizer.param_groups for param in group["params"] if param not in names]
    if strangers:
        raise ShardfitError(
            "the optimizer holds parameters that the model does not have",
            evidence=f"{len(strangers)} of them; shapes {some([str(tuple(p.shape)) for p in strangers])}",
            fix="build the optimizer after sharding, from the parameters of the model that is saved",
            code="SF501",
        )


def _number_params(optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> dict[int, Tensor]:
    return {
        number: param
        for live, group in zip(optimizer.param_groups, packed["param_groups"], strict=True)
        for param, number in zip(live["params"], group["params"], strict=True)
    }


def _members(group: dict[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in _MEMBERS if key in group}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return float(one) == float(other)
    return bool(one == other)


def _held_alike(value: Any, live: Any) -> Any:
    """A hyper-parameter as the live group holds it: a number, or a tensor (a compiled step)."""
    if isinstance(live, Tensor):
        return torch.full_like(live, float(value))
    return float(value) if isinstance(value, Tensor) and isinstance(live, float) else value


def _refuse_local_parts(state: dict[str, Any], param: Tensor, name: str) -> None:
    if not isinstance(param, DTensor) or param.to_local().shape == param.shape:
        return
    for key, value in state.items():
        if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.ndim > 0:
            raise ShardfitError(
                "the optimizer keeps one rank's part of its state in a plain tensor",
                evidence=f"state {key!r} of {name}: {tuple(value.shape)}, the parameter is a DTensor of "
                f"{tuple(param.shape)} with {tuple(param.to_local().shape)} on this rank",
                fix="use an optimizer that works on DTensors (those of torch.optim do)",
            )


def some(names: Iterable[str], limit: int = 5, between: str = ", ") -> str:
    """The first few names, and how many more there are."""
    listed = list(names)
    more = len(listed) - limit
    return between.join(listed[:limit]) + (f" and {more} more" if more > 0 else "")
