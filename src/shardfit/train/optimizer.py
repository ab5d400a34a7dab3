"""build_optimizer: any torch optimizer over a sharded model's parameters, grouped by rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardfit import _torch
from shardfit.errors import ShardfitError
from shardfit.train.local_step import ELEMENTWISE, step_on_local_parts

Groups = Sequence[Mapping[str, Any]] | Callable[[str, Tensor], Mapping[str, Any]]

# Devices on which a class has one kernel for the whole step.
_FUSED: dict[type[Optimizer], frozenset[str]] = {
    torch.optim.Adam: frozenset({"cpu", "cuda", "xpu", "mps"}),
    torch.optim.AdamW: frozenset({"cpu", "cuda", "xpu", "mps"}),
    torch.optim.SGD: frozenset({"cpu", "cuda", "xpu", "mps"}),
    torch.optim.Adagrad: frozenset({"cpu"}),
}
_IMPLEMENTATIONS = ("fused", "foreach", "capturable", "differentiable")
_REFUSED = {
    "LBFGS": (
        "SF521",
        "it lays all parameters into one flat tensor",
        "an optimizer that updates each parameter",
    ),
    "SparseAdam": ("SF330", "it needs sparse gradients, which can't be sharded", "sparse=False and Adam"),
}


def build_optimizer(
    model: nn.Module,
    cls: type[Optimizer] = torch.optim.AdamW,
    *,
    lr: float | Tensor | None = None,
    groups: Groups | None = None,
    **options: Any,
) -> Optimizer:
    """`cls(parameters, lr=lr, **options)` over a sharded model, in its fastest form.

    What comes back is an instance of `cls` itself, which holds the model's DTensors: schedulers,
    scalers, hooks, `state_dict` and `torch.distributed.checkpoint` see what they expect.
    Faster, with the same numbers to rounding:

    * Where `cls` has a fused kernel for the parameters' device it is chosen (AdamW on a CPU: 5 to
      9 times the default's speed). Give `fused`, `foreach`, `capturable` or `differentiable` to
      choose yourself.
    * Optimizers of torch.optim that work element by element step on local tensors, without the
      cost of DTensor operators (`shardfit.train.local_step`).

    Units that are still gathered after a forward are resharded first, so that the parameters are
    those that are trained.

    Args:
        model: after `shard`, or `fully_shard`.
        cls: any class of optimizers that takes parameter groups and updates each parameter by
            itself.
        lr: learning rate. None leaves it to `cls`.
        groups: None puts all parameters into one group, as `cls(model.parameters())` does.
            Otherwise options by group, and each trainable parameter must be in exactly one:

            * `{"match": patterns, ...}` takes the parameters whose names match a pattern or one of
              several (`"*.bias"`, as in fnmatch); one group without "match" takes the others;
            * `{"params": parameters, ...}` as in torch, with parameters of the sharded model;
            * `f(name, parameter)` returns the options of a parameter; equal ones make a group.

            `decay_matrices(model)` is a ready-made value.
        options: the other arguments of `cls`, for groups that don't set them.

    Raises:
        ShardfitError: the model isn't sharded (SF501), has no weights yet (SF201), or has
            trainable parameters outside every unit (SF301); an optimizer that can't work on
            shards (SF521, SF330); a group that matches nothing (SF512); a parameter in no group
            or in two (SF513); parameters that are not the model's (SF501).
    """
    _refuse_class(cls)
    parameters = _sharded_parameters(model)
    listed = list(parameters.values()) if groups is None else _grouped(parameters, groups)
    if lr is not None:
        options = {"lr": lr, **options}
    chosen = any(options.get(name) is not None for name in _IMPLEMENTATIONS)
    if not chosen and _can_fuse(cls, parameters.values()):
        options["fused"] = True
    optimizer = cls(listed, **options)
    if type(optimizer) in ELEMENTWISE and not options.get("differentiable"):
        step_on_local_parts(optimizer)
    return optimizer


def decay_matrices(model: nn.Module) -> list[dict[str, Any]]:
    """Groups in which only matrices decay: `build_optimizer(model, groups=decay_matrices(model))`.

    Biases, scales of norms and other vectors, and the tables of `nn.Embedding` (also where a
    head shares it) have weight_decay 0.0; the others keep what the optimizer is given.
    """
    parameters = _sharded_parameters(model)
    kept_whole = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    decayed = [p for p in parameters.values() if p.ndim >= 2 and id(p) not in kept_whole]
    ids = {id(p) for p in decayed}
    others = [p for p in parameters.values() if id(p) not in ids]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


@torch.no_grad()
def find_unmoved(model: nn.Module, step: Callable[[], Any]) -> list[str]:
    """Call `step()` and name the trainable parameters of which it changed no element on any rank.

    A collective call. For the time of the step it keeps a copy of this rank's shards. Frozen
    training parts, an optimizer of dead parameters and a forgotten group show here; so does a
    gradient that is exactly zero.
    """
    before = {n: _torch.local_of(p).clone() for n, p in model.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        step()
    now = dict(model.named_parameters())
    moved = torch.tensor([not torch.equal(part, _torch.local_of(now[name])) for name, part in before.items()])
    if torch.distributed.is_initialized():
        votes: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(votes, moved)
        moved = torch.stack(votes).any(0)
    return [name for name, has_moved in zip(before, moved.tolist(), strict=True) if not has_moved]


def _refuse_class(cls: type[Optimizer]) -> None:
    if not (inspect.isclass(cls) and issubclass(cls, Optimizer)):
        raise ShardfitError(
            "build_optimizer needs a class of optimizers",
            evidence=f"got {cls!r}",
            fix="build_optimizer(model, torch.optim.AdamW, lr=...)",
        )
    for base in cls.__mro__:
        if base.__name__ in _REFUSED and base.__module__.startswith("torch.optim"):
            code, why, instead = _REFUSED[base.__name__]
            raise ShardfitError(
                f"{cls.__name__} can't train sharded parameters",
                evidence=why,
                fix=f"use {instead}",
                code=code,
            )


def _sharded_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters by name, resharded; the first name where tied."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.reshard()
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    if not parameters:
        raise ShardfitError("the model has no parameters", evidence=type(model).__name__)
    if empty := [name for name, p in parameters.items() if not _torch.has_values(_torch.local_of(p))]:
        raise ShardfitError(
            "the optimizer is built before the model has weights",
            evidence=f"{_few(empty)} on the meta device, or deferred",
            fix="call shard(model), which fills them, before build_optimizer",
            code="SF201" if units else "SF501",
        )
    if not units:
        raise ShardfitError(
            "the optimizer is built before the model is sharded",
            evidence=f"none of {len(parameters)} parameters is sharded; sharding replaces them all, and the "
            "optimizer would step on the old ones",
            fix="call shard(model) first, then build_optimizer",
            code="SF501",
        )
    outside = [n for n, p in parameters.items() if p.requires_grad and not isinstance(p, DTensor)]
    if outside:
        raise ShardfitError(
            "trainable parameters are in no unit, and would drift apart between ranks",
            evidence=_few(outside),
            fix="shard the root as well (shard does), or freeze them",
            code="SF301",
        )
    return parameters


def _grouped(parameters: Mapping[str, Tensor], groups: Groups) -> list[dict[str, Any]]:
    if callable(groups):
        return _group_by_rule(parameters, groups)
    if isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups):
        raise ShardfitError(
            "groups is a list of tables, or a function of name and parameter",
            evidence=f"got {type(groups).__name__}",
            fix='groups=[{"match": "*.bias", "weight_decay": 0.0}, {}]',
        )
    names = {id(parameter): name for name, parameter in parameters.items()}
    members: list[list[str] | None] = []
    for number, group in enumerate(groups):
        if "params" in group:
            members.append(_listed_names(group["params"], names, number))
        elif "match" in group:
            members.append(_matching(group["match"], parameters, number))
        else:
            members.append(None)
    rest = [number for number, some in enumerate(members) if some is None]
    if len(rest) > 1:
        raise ShardfitError(
            "two groups take the parameters that the others leave",
            evidence=f"groups {rest} have neither match nor params",
            fix="leave one of them",
            code="SF513",
        )
    taken = [name for some in members if some is not None for name in some]
    seen = set(taken)
    if len(taken) != len(seen):
        twice = sorted({name for name in taken if taken.count(name) > 1})
        raise ShardfitError(
            "a parameter is in two groups",
            evidence=_few(twice),
            fix="make the patterns exclude each other",
            code="SF513",
        )
    left = [name for name in parameters if name not in seen]
    if rest:
        members = [left if some is None else some for some in members]
    elif forgotten := [name for name in left if parameters[name].requires_grad]:
        raise ShardfitError(
            "trainable parameters are in no group, and would never move",
            evidence=_few(forgotten),
            fix="add a group without match, which takes all that is left",
            code="SF513",
        )
    return [
        {**_options(group), "params": [parameters[name] for name in some or ()]}
        for group, some in zip(groups, members, strict=True)
        if some
    ]


def _group_by_rule(
    parameters: Mapping[str, Tensor], rule: Callable[[str, Tensor], Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Parameters with equal options together, in the order in which the options first come up."""
    made: list[tuple[dict[str, Any], list[Tensor]]] = []
    for name, parameter in parameters.items():
        options = rule(name, parameter)
        if not isinstance(options, Mapping):
            raise ShardfitError(
                "the rule for groups gave no options for a parameter",
                evidence=f"{name}: {options!r}",
                fix="return a dict; an empty one takes the optimizer's own options",
                code="SF513",
            )
        for known, members in made:
            if known == options:
                members.append(parameter)
                break
        else:
            made.append((dict(options), [parameter]))
    return [{**options, "params": members} for options, members in made]


def _listed_names(params: Any, names: Mapping[int, str], number: int) -> list[str]:
    listed = [params] if isinstance(params, Tensor) else list(params)
    listed = [item[1] if isinstance(item, tuple) else item for item in listed]
    strangers = [p for p in listed if id(p) not in names]
    if strangers:
        raise ShardfitError(
            "a group holds parameters that the sharded model does not have",
            evidence=f"group {number}: {len(strangers)} of {len(listed)}, of shapes "
            f"{_few([str(tuple(p.shape)) for p in strangers])}",
            fix="collect them after shard(model), and not between a forward and its backward",
            code="SF501",
        )
    return [names[id(p)] for p in listed]


def _matching(patterns: Any, parameters: Mapping[str, Tensor], number: int) -> list[str]:
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    found = []
    for pattern in patterns:
        hits = [name for name in parameters if fnmatchcase(name, pattern)]
        if not hits:
            raise ShardfitError(
                "a pattern matches no parameter",
                evidence=f"group {number}: {pattern!r}; names are like {_few(list(parameters))}",
                fix="correct the pattern, or remove it",
                code="SF512",
            )
        found += hits
    return list(dict.fromkeys(found))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("match", "params")}


def _can_fuse(cls: type[Optimizer], parameters: Iterable[Tensor]) -> bool:
    devices = _FUSED.get(cls, frozenset())
    return all(p.device.type in devices and p.is_floating_point() for p in parameters)


def _few(names: Sequence[str], limit: int = 4) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
