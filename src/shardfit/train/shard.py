"""shard: apply a plan to a model. The only caller of fully_shard."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import cast

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

from shardfit.plan import MeshShape, Plan, Precision, Unit
from shardfit.train.agree import refuse_differences
from shardfit.train.carry import note_parameters, put_back
from shardfit.train.faults import refuse_faults, refuse_unfit
from shardfit.train.gathered import keep_fresh
from shardfit.train.init import Recording, is_deferred, take_recording
from shardfit.train.launch import Ranks, current_ranks
from shardfit.train.materialize import materialize
from shardfit.train.mesh import mesh_shape
from shardfit.train.metainit import record_initialisation
from shardfit.train.recompute import checkpoint_blocks, compile_blocks
from shardfit.train.stored import open_weights
from shardfit.train.unfit import repeated_blocks
from shardfit.train.units import plan_units
from shardfit.train.weights import allocate, load_weights

_plans: weakref.WeakKeyDictionary[nn.Module, Plan] = weakref.WeakKeyDictionary()


def shard(
    model: nn.Module,
    plan: Plan | None = None,
    ranks: Ranks | None = None,
    *,
    weights: str | os.PathLike[str] | None = None,
) -> nn.Module:
    """Shard `model` in place by `plan` over the data axes of `ranks`, and return it.

    Everything that can be wrong is looked for first: if this raises a ShardfitError that
    names the plan or the model, the model is as it was. Then, for each unit, leaves first:
    cast what is trained to the master dtype, move to the device, shard. So a rank never
    holds more than the model as it came, its shards and one unit.

    After it:

    * Every trainable parameter is a DTensor on the data axes. The parameter objects are new:
      build the optimizer after it. Ties, attributes set on parameters, and post-accumulate
      hooks are carried over; paths are the same; units' classes are new subclasses of
      FSDPModule, so that `isinstance` holds and `type(m) is` doesn't.
    * Gradients are averages over the data ranks. A parameter that a rank didn't use counts
      as a zero there (torch 2.13 and later); one that no rank used has a zero gradient, not
      None. `model.set_reduce_scatter_unused_params(False)` gives torch's own behaviour.
    * Nothing computes with stale weights after a forward without backward, and
      `model.parameters()` is always the sharded ones: see `shardfit.train.gathered`.

    A deferred or meta model is filled shard by shard at the end. A model with weights must
    have the same ones on every rank.

    Args:
        model: a plain module, or one whose "tensor" axis `parallelize_module` has used.
        plan: None is plan_units(model).
        ranks: None is those of init_distributed().
        weights: a file or folder for `load_weights`, strictly: parameters and persistent buffers
            of a deferred or meta model are then never initialised, only loaded. None: a
            deferred or meta model is initialised; load into it, if at all, afterwards.

    Raises:
        ShardfitError: see `shardfit.train.faults`, `shardfit.train.unfit` and `refuse_differences`.
    """
    refuse_unfit(model)
    ranks = ranks or current_ranks()
    plan = plan or plan_units(model)
    plan = plan.replace(mesh=mesh_shape(ranks.mesh)) if _fits_any_mesh(plan) else plan
    refuse_faults(model, plan, ranks)
    refuse_differences(model, plan, ranks, with_parameters=weights is None)

    recording = _take_recording(model, weights)
    carried = note_parameters(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    blocks = repeated_blocks(modules, plan)
    if plan.checkpointing != "none":
        checkpoint_blocks(blocks, plan.checkpointing)
    if plan.compile:
        compile_blocks(blocks)
    firsts = [_shard_unit([modules[path] for path in unit.paths], unit, plan, ranks) for unit in plan.units]
    _set_prefetch(firsts, plan.prefetch)
    _skip_gather_in_backward(modules, plan)
    if hasattr(model, "set_reduce_scatter_unused_params"):
        cast(FSDPModule, model).set_reduce_scatter_unused_params(True)
    kept = [first for first, unit in zip(firsts, plan.units, strict=True) if unit.reshard is not True]
    keep_fresh(model, kept, plan.methods)
    _fill(model, recording, ranks, plan, weights)
    put_back(model, carried)
    _check_sharded(model, ranks)
    _plans[model] = plan
    return model


def plan_of(model: nn.Module) -> Plan | None:
    """The plan that `shard` applied to `model`, with the sizes of the mesh that it was applied on."""
    return _plans.get(model)


def _take_recording(model: nn.Module, weights: str | os.PathLike[str] | None) -> Recording | None:
    """How to make the values of a deferred or meta model; its deferred tensors are meta after it."""
    if is_deferred(model):
        return take_recording(model)
    return record_initialisation(model) if weights is None and _unwritten(model) else None


def _fits_any_mesh(plan: Plan) -> bool:
    return plan.mesh == MeshShape()


def _shard_unit(members: Sequence[nn.Module], unit: Unit, plan: Plan, ranks: Ranks) -> FSDPModule:
    """Shard the modules of one unit together; returns the first of them."""
    for member in members:
        for parameter in member.parameters():
            _prepare(parameter, plan.precision)
    fully_shard(
        list(members) if len(members) > 1 else members[0],
        mesh=ranks.data_mesh,
        reshard_after_forward=unit.reshard,
        mp_policy=_policy(plan.precision, is_root="" in unit.paths),
        offload_policy=CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
        if plan.offload
        else OffloadPolicy(),
    )
    return cast(FSDPModule, members[0])


def _prepare(parameter: nn.Parameter, precision: Precision) -> None:
    """Cast a parameter to the master dtype, if it is trained, and make it contiguous, as FSDP2 asks."""
    if isinstance(parameter, DTensor):
        return
    master = precision.master and getattr(torch, precision.master)
    if master and parameter.requires_grad and parameter.is_floating_point():
        parameter.data = parameter.data.to(master)
    parameter.data = parameter.data.contiguous()


def _policy(precision: Precision, *, is_root: bool) -> MixedPrecisionPolicy:
    def dtype(name: str | None) -> torch.dtype | None:
        return getattr(torch, name) if name else None

    return MixedPrecisionPolicy(
        param_dtype=dtype(precision.param),
        reduce_dtype=dtype(precision.reduce),
        output_dtype=dtype(precision.output) if is_root else None,
        cast_forward_inputs=precision.cast_inputs,
    )


def _set_prefetch(firsts: Sequence[FSDPModule], depth: int) -> None:
    """Gather `depth` units ahead, in the plan's order; the root (last in it) runs first."""
    if depth == 0:
        return
    order = [firsts[-1], *firsts[:-1]]
    for index, unit in enumerate(order):
        unit.set_modules_to_forward_prefetch(order[index + 1 : index + 1 + depth])
        # In backward the root comes first too: its output's gradient arrives before any other.
        before = order[:0:-1] if index == 0 else order[index - 1 : 0 : -1]
        unit.set_modules_to_backward_prefetch(before[:depth])


def _skip_gather_in_backward(modules: dict[str, nn.Module], plan: Plan) -> None:
    """The gradient of a lookup doesn't need the table: don't gather it again for backward."""
    for unit in plan.units:
        members = [modules[path] for path in unit.paths]
        if all(isinstance(member, nn.Embedding) for member in members):
            cast(FSDPModule, members[0]).set_unshard_in_backward(False)


def _fill(
    model: nn.Module,
    recording: Recording | None,
    ranks: Ranks,
    plan: Plan,
    weights: str | os.PathLike[str] | None,
) -> None:
    """Write what has no values yet: from a file, the recording of its construction, or its own init."""
    if not weights and not _unwritten(model):
        return
    device = torch.device("cpu") if plan.offload else ranks.device
    if weights:
        allocate(model, open_weights(weights).keys(), device=device)
        load_weights(model, weights)
    if _unwritten(model):
        materialize(model, recording, device=device)
    # FSDP2 copies shards that are shorter than others into padded ones, at the first forward, or
    # after any load_state_dict. Have it done now: from here on local tensors are the ones that train.
    nn.Module.load_state_dict(model, {}, strict=False)


def _unwritten(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def _check_sharded(model: nn.Module, ranks: Ranks) -> None:
    """What holds after shard, whatever the plan: a failure is a mistake of ours."""
    axes = set(ranks.data_mesh.mesh_dim_names or ())
    for path, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{path} is in no unit"
        assert axes <= set(parameter.device_mesh.mesh_dim_names or ()), f"{path} is not on {axes}"
