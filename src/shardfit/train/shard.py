"""shard: apply a plan to a model. The only caller of fully_shard."""

from __future__ import annotations

import weakref

import torch
import torch.nn as nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from shardfit.plan import Plan, Precision
from shardfit.train.launch import Ranks, current_ranks
from shardfit.train.mesh import mesh_shape
from shardfit.train.units import plan_units

_plans: weakref.WeakKeyDictionary[nn.Module, Plan] = weakref.WeakKeyDictionary()


def shard(model: nn.Module, plan: Plan | None = None, ranks: Ranks | None = None) -> nn.Module:
    """Shard `model` in place by `plan`, and return it."""
    try:
        from shardfit.train import init
    except ImportError:  # until train/init.py is there
        init = None

    ranks = ranks or current_ranks()
    plan = plan or plan_units(model)
    recording = init.take_recording(model) if init else None
    policy = _mixed_precision(plan.precision, root=False)
    offload = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if plan.offload else OffloadPolicy()
    modules = dict(model.named_modules(remove_duplicate=False))
    for unit in plan.units:
        is_root = "" in unit.paths
        members = [modules[path] for path in unit.paths]
        _to_master(members, plan.precision)
        fully_shard(
            members if len(members) > 1 else members[0],
            mesh=ranks.data_mesh,
            reshard_after_forward=unit.reshard,
            mp_policy=_mixed_precision(plan.precision, root=is_root),
            offload_policy=offload,
        )
    if init and any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        init.materialize(model, recording, device=ranks.device)
    _plans[model] = plan.replace(mesh=mesh_shape(ranks.mesh))
    return model


def plan_of(model: nn.Module) -> Plan | None:
    """The plan that `shard` applied to `model`, with the sizes of the mesh that it was applied on."""
    return _plans.get(model)


def _mixed_precision(precision: Precision, *, root: bool) -> MixedPrecisionPolicy:
    def dtype(name: str | None) -> torch.dtype | None:
        return getattr(torch, name) if name else None

    return MixedPrecisionPolicy(
        param_dtype=dtype(precision.param),
        reduce_dtype=dtype(precision.reduce),
        output_dtype=dtype(precision.output) if root else None,
        cast_forward_inputs=precision.cast_inputs,
    )


def _to_master(members: list[nn.Module], precision: Precision) -> None:
    """Cast what is trained to the master dtype, while it is still whole: one unit at a time."""
    if precision.master is None:
        return
    dtype = getattr(torch, precision.master)
    for member in members:
        for parameter in member.parameters():
            if (
                parameter.requires_grad
                and parameter.is_floating_point()
                and not isinstance(parameter, DTensor)
            ):
                parameter.data = parameter.data.to(dtype)
