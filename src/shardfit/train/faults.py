"""What stands in the way of sharding a model by a plan: all of it, before anything is touched."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from shardfit.errors import ShardfitError
from shardfit.plan import Plan
from shardfit.train.launch import Ranks
from shardfit.train.mesh import mesh_shape
from shardfit.train.structure import Structure, is_called
from shardfit.train.unfit import module_faults, norm_faults, parameter_faults, wrapping_faults


def refuse_unfit(model: nn.Module) -> None:
    """Raise if `model` is no plain module: wrapped, sharded already, or no module at all."""
    _raise(wrapping_faults(model))


def refuse_faults(model: nn.Module, plan: Plan, ranks: Ranks) -> None:
    """Raise one error that lists everything that keeps `plan` from being applied to `model`."""
    structure = Structure(model)
    faults = [*_mesh_faults(plan, ranks), *_offload_faults(plan, ranks)]
    paths = list(_path_faults(structure, plan))
    faults += paths
    if not paths:
        faults += _unit_faults(structure, plan)
    faults += [
        *parameter_faults(model, plan),
        *module_faults(structure, plan),
        *norm_faults(structure, plan),
        *_method_faults(model, plan),
    ]
    _raise(faults)


def _raise(faults: Iterable[ShardfitError]) -> None:
    faults = list(faults)
    if len(faults) == 1:
        raise faults[0]
    if faults:
        raise ShardfitError(
            f"the model can't be sharded by this plan, for {len(faults)} reasons",
            evidence="\n".join(f"- {fault}" for fault in faults),
            code=faults[0].code,
        )


def _mesh_faults(plan: Plan, ranks: Ranks) -> Iterator[ShardfitError]:
    live = mesh_shape(ranks.mesh)
    made_for = plan.mesh if plan.mesh.shard else dataclasses.replace(plan.mesh, shard=live.shard)
    if made_for != live:
        yield ShardfitError(
            "the plan was made for another mesh",
            evidence=f"plan: {plan.mesh}, ranks: {live}",
            fix="give init_distributed the plan's sizes, or plan again",
            code="SF104",
        )
    over = live.shard or 1
    for unit in plan.units:
        if not isinstance(unit.reshard, bool) and (unit.reshard < 1 or over % unit.reshard):
            yield ShardfitError(
                "a unit can't be resharded to that many ranks",
                evidence=f"{_names(unit.paths)}: reshard={unit.reshard}, shard axis {over}",
                fix=f"a divisor of {over}, or True or False",
            )


def _offload_faults(plan: Plan, ranks: Ranks) -> Iterator[ShardfitError]:
    backends = str(dist.get_backend_config(dist.group.WORLD))
    if plan.offload and ranks.device.type != "cpu" and "cpu" not in backends:
        yield ShardfitError(
            "offloaded shards live in CPU memory, but the process group has no CPU backend",
            evidence=f"backends: {backends}",
            fix='init_process_group("cpu:gloo,cuda:nccl"), or let init_distributed make the group',
            code="SF412",
        )


def _path_faults(structure: Structure, plan: Plan) -> Iterator[ShardfitError]:
    named: dict[int, str] = {}
    for unit in plan.units:
        for path in unit.paths:
            module = structure.all_modules.get(path)
            if module is None:
                near = difflib.get_close_matches(path, structure.all_paths, n=3, cutoff=0.4)
                yield ShardfitError(
                    "a unit's module is not in the model",
                    evidence=f"{path!r}; near misses: {', '.join(near) or 'none'}",
                    fix="plan this model with plan_units, or correct the path",
                )
                continue
            if not is_called(module):
                yield ShardfitError(
                    "a container without forward can't be a unit",
                    evidence=f"{path} is a {type(module).__name__}",
                    fix=f'name its items: "{path}.*"',
                    code="SF308",
                )
            if id(module) in named:
                yield ShardfitError(
                    "one module is named twice, under two paths",
                    evidence=f"{named[id(module)]} and {path} are the same object",
                    fix="name it once",
                    code="SF317",
                )
            named[id(module)] = path


def _unit_faults(structure: Structure, plan: Plan) -> Iterator[ShardfitError]:
    """Faults of what units hold together: ties over units, dtypes, nothing at all."""
    owners: dict[int, tuple[int, str]] = {}
    claimed: set[int] = set()
    for index, unit in enumerate(plan.units):
        held: dict[str, nn.Parameter] = {}
        for path in unit.paths:
            for name, module in _unclaimed(path, structure.all_modules[path], claimed):
                held |= {_join(name, n): p for n, p in module.named_parameters(recurse=False)}
        ties = {name: owners[id(p)] for name, p in held.items() if id(p) in owners}
        for name, (other, other_name) in ties.items():
            pair = (plan.units[other].paths, unit.paths)
            yield ShardfitError(
                "a tied parameter is in two units",
                evidence=f"{other_name} (unit {_names(pair[0])}) is {name} (unit {_names(pair[1])})",
                fix="put both modules in one unit, or leave both to the root",
                code="SF304",
            )
        owners |= {id(p): (index, name) for name, p in held.items() if name not in ties}
        if not held and "" not in unit.paths:
            yield ShardfitError(
                "a unit holds no parameters",
                evidence=f"{_names(unit.paths)}: none, or all in units inside it",
                fix="leave it out of the plan",
            )
        yield from _dtype_faults(unit.paths, held, plan)


def _unclaimed(path: str, module: nn.Module, claimed: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a unit takes: its own, down to those that an earlier unit has."""
    claimed.add(id(module))
    yield path, module
    for name, child in module.named_children():
        if id(child) not in claimed:
            yield from _unclaimed(_join(path, name), child, claimed)


def _dtype_faults(
    paths: tuple[str, ...], held: dict[str, nn.Parameter], plan: Plan
) -> Iterator[ShardfitError]:
    dtypes: dict[torch.dtype, str] = {}
    for name, parameter in held.items():
        if parameter.requires_grad and (plan.precision.master is None or isinstance(parameter, DTensor)):
            dtypes.setdefault(parameter.dtype, name)
        if plan.precision.param and not parameter.is_floating_point():
            yield ShardfitError(
                "only floating parameters can be cast to the precision's param dtype",
                evidence=f"{name}: {parameter.dtype}, param={plan.precision.param}",
                fix="make it a buffer, or leave Precision.param out",
            )
    if len(dtypes) > 1:
        yield ShardfitError(
            "a unit has trainable parameters of two dtypes",
            evidence=f"{_names(paths)}: " + ", ".join(f"{n} {d}" for d, n in dtypes.items()),
            fix='Precision(master="float32") keeps all of them in float32; param= computes in less',
            code="SF309",
        )


def _method_faults(model: nn.Module, plan: Plan) -> Iterator[ShardfitError]:
    for name in plan.methods:
        if not callable(getattr(model, name, None)):
            yield ShardfitError(
                "the plan names a method that the model doesn't have",
                evidence=f"{type(model).__name__}.{name}",
                fix="methods= are names of the root's methods",
            )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _names(paths: tuple[str, ...]) -> str:
    return " + ".join(path or "(root)" for path in paths)
