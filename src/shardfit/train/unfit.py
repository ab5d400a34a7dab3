"""What in a model can't be sharded, however its units are chosen."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from shardfit import _torch
from shardfit.errors import ShardfitError
from shardfit.plan import Plan
from shardfit.train.mesh import DATA_AXES
from shardfit.train.structure import Structure, is_leaf


def wrapping_faults(model: nn.Module) -> Iterator[ShardfitError]:
    if not isinstance(model, nn.Module):
        yield ShardfitError(
            "only a module can be sharded",
            evidence=f"got {type(model).__name__}",
            fix="shard(model), then build_optimizer(model, ...)",
        )
        return
    for path, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
            yield ShardfitError(
                f"the model is wrapped in {type(module).__name__}",
                evidence=f"at {path or 'the root'}",
                fix="shard the plain model instead of the wrapped one; shard replaces the wrapper",
                code="SF314",
            )
        if isinstance(module, FSDPModule):
            yield ShardfitError(
                "the model is sharded already",
                evidence=f"{path or 'the root'} is a {type(module).__name__}",
                fix="call shard once, in one place",
                code="SF319",
            )
            return
    # A wrapper that was made before keeps every whole parameter alive.
    if _is_in_ddp(model):
        gc.collect()
        if _is_in_ddp(model):
            yield ShardfitError(
                "the model is inside a DistributedDataParallel that is still alive",
                evidence="it holds all parameters whole, beside the shards",
                fix="don't wrap the model in DDP",
                code="SF324",
            )


def _is_in_ddp(model: nn.Module) -> bool:
    return any(
        issubclass(type(held), DistributedDataParallel) and getattr(held, "module", None) is model
        for held in gc.get_objects()
    )


def parameter_faults(model: nn.Module, plan: Plan) -> Iterator[ShardfitError]:
    for path, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            yield ShardfitError(
                "a lazy parameter has no shape yet",
                evidence=path,
                fix="run one forward on a small input before shard",
            )
            continue
        if parameter.ndim == 0:
            yield ShardfitError(
                "a scalar parameter can't be sharded",
                evidence=path,
                fix="give it one dim: nn.Parameter(torch.tensor([value])), and reshape it in old checkpoints",
                code="SF329",
            )
        if _torch.tensor_hooks(parameter):
            yield ShardfitError(
                "a gradient hook on a parameter would never fire: sharding replaces the parameter",
                evidence=f"{path}: set with register_hook",
                fix="after shard, use register_post_accumulate_grad_hook (p.grad is the reduced shard)",
                code="SF334",
            )
        if isinstance(parameter, DTensor):
            axes = set(parameter.device_mesh.mesh_dim_names or ())
            if not axes or axes & set(DATA_AXES):
                yield ShardfitError(
                    "a parameter is distributed over the data axes already",
                    evidence=f"{path}: {parameter.placements} on axes {sorted(axes)}",
                    fix='only the "tensor" axis may be used before shard: parallelize_module(m, '
                    'ranks.mesh["tensor"], ...)',
                    code="SF319",
                )
            master = plan.precision.master
            if master and parameter.requires_grad and parameter.dtype != getattr(torch, master):
                yield ShardfitError(
                    "a parameter on the tensor axis does not have the master dtype",
                    evidence=f"{path}: {parameter.dtype}, master={master}",
                    fix=f"cast the model to {master} before parallelize_module",
                    code="SF402",
                )
    for path, buffer in model.named_buffers():
        if isinstance(buffer, UninitializedBuffer):
            yield ShardfitError(
                "a lazy buffer has no shape yet", evidence=path, fix="run one forward before shard"
            )


def module_faults(structure: Structure, plan: Plan) -> Iterator[ShardfitError]:
    for path, module in structure.modules.items():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or not module.weight.requires_grad:
            continue
        if module.sparse:
            yield ShardfitError(
                "sparse gradients can't be reduced",
                evidence=f"{path or 'the root'}: {type(module).__name__}(sparse=True)",
                fix="sparse=False",
                code="SF330",
            )
        if module.max_norm is not None:
            yield ShardfitError(
                "max_norm writes to the weight in forward, and what is written to a gathered weight is lost",
                evidence=f"{path or 'the root'}: {type(module).__name__}(max_norm={module.max_norm})",
                fix="normalise the looked-up rows instead, or the weight after each step",
                code="SF219",
            )
    if plan.checkpointing != "none":
        if not repeated_blocks(structure.all_modules, plan):
            yield ShardfitError(
                "there are no repeated blocks to checkpoint",
                evidence=f"units: {'; '.join(' + '.join(unit.paths) or '(root)' for unit in plan.units)}",
                fix='checkpointing="none", or name the blocks: plan_units(model, units=["layers.*"])',
            )
        caching = [
            f"{path}.config" if path else "config"
            for path, module in structure.modules.items()
            if getattr(getattr(module, "config", None), "use_cache", False) is True
        ]
        if caching:
            yield ShardfitError(
                "a recomputed block would write to the cache twice",
                evidence=f"use_cache is True in {', '.join(caching[:4])}"
                + (f" and {len(caching) - 4} more" if len(caching) > 4 else ""),
                fix="set use_cache = False in each: model.config, model.decoder.config if there is one",
            )


def norm_faults(structure: Structure, plan: Plan) -> Iterator[ShardfitError]:
    low = plan.precision.param and getattr(torch, plan.precision.param)
    for path, module in structure.modules.items():
        if (
            low
            and isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm)
            and module.weight is not None
            and module.running_mean is not None
            and module.running_mean.dtype != low
        ):
            yield ShardfitError(
                f"batch norm keeps {_short(module.running_mean.dtype)} statistics and can't compute in "
                f"{plan.precision.param} beside them",
                evidence=f"{path}: {type(module).__name__}",
                fix="leave Precision.param out, and call the model under torch.autocast",
                code="SF409",
            )
            return


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def repeated_blocks(modules: dict[str, nn.Module], plan: Plan) -> list[nn.Module]:
    """The modules with children, of the plan's units, whose class occurs more than once in them."""
    members = [modules[path] for unit in plan.units for path in unit.paths if path and path in modules]
    classes = [type(member) for member in members]
    return [member for member in members if not is_leaf(member) and classes.count(type(member)) > 1]
