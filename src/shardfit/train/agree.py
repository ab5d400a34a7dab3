"""Whether all ranks hold the same model, before each keeps only its part of it."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardfit import _torch
from shardfit.errors import ShardfitError
from shardfit.plan import Plan
from shardfit.train.init import recipe_digest
from shardfit.train.launch import Ranks


def refuse_differences(model: nn.Module, plan: Plan, ranks: Ranks, *, with_parameters: bool = True) -> None:
    """Raise, on all ranks alike, where ranks would shard different models.

    Compared over the data axes: the plan, names, shapes and dtypes; and where weights are
    there already, a checksum of each parameter and buffer, since each rank keeps its own
    rows of its own copy. `with_parameters` False leaves the values of parameters out.

    Raises:
        ShardfitError: another plan or structure; another value (SF205 for a parameter,
            SF218 for a buffer).
    """
    if ranks.data_world == 1:
        return
    parameters = {name for name, _ in model.named_parameters()}
    tensors = [*model.named_parameters(), *model.named_buffers()]
    words = [plan.digest(), *(_outline(name, tensor) for name, tensor in tensors)]
    recipe = recipe_digest(model) if with_parameters else ""
    differing = _differing(torch.tensor([_short("\n".join(words)), _short(recipe)]), ranks)
    if 0 in differing:
        raise ShardfitError(
            "ranks are about to shard different models, or by different plans",
            evidence=f"rank {ranks.rank} has {len(tensors)} tensors, plan {plan.digest()[:12]}",
            fix="build the model from the same configuration on every rank, on all with weights or on none",
        )
    if differing:
        raise ShardfitError(
            "the ranks would draw different weights, and each would keep its rows of its own",
            evidence="the deferred model was constructed from different random states",
            fix="seed alike on every rank before the model is built (seed_all)",
            code="SF205",
        )
    real = [
        (name, tensor)
        for name, tensor in tensors
        if _torch.has_values(tensor) and (with_parameters or name not in parameters)
    ]
    if not real:
        return
    differing = _differing(torch.stack([_checksum(tensor) for _, tensor in real]), ranks)
    if differing:
        names = [real[index][0] for index in differing]
        is_parameter = names[0] in parameters
        raise ShardfitError(
            "the ranks have different weights, and each would keep its rows of its own"
            if is_parameter
            else "a buffer differs between ranks",
            evidence=f"{names[0]} is the first of {len(names)} that differ, of {len(real)}",
            fix="seed alike on every rank before the model is built (seed_all), or build it within "
            "deferred(), or load the weights on every rank",
            code="SF205" if is_parameter else "SF218",
        )


def _short(text: str) -> int:
    """A digest that fits an int64."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


def _outline(name: str, tensor: torch.Tensor) -> str:
    values = "values" if _torch.has_values(tensor) else "shape only"
    return f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad} {values}"


def _differing(values: torch.Tensor, ranks: Ranks) -> list[int]:
    """Indices at which int64 `values` (1-D) are not the same on all data ranks."""
    device = ranks.device if _needs_device(ranks.data_mesh) else torch.device("cpu")
    values = values.to(device)
    highest = torch.cat([values, ~values])  # ~v = -v - 1 turns the smallest into the largest
    mesh = ranks.data_mesh
    for dim in range(mesh.ndim):
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
    most, least = highest.chunk(2)
    return (most != ~least).nonzero().flatten().tolist()


def _needs_device(mesh: DeviceMesh) -> bool:
    return "cpu" not in str(dist.get_backend_config(mesh.get_group(0)))


@torch.no_grad()
def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit sum of the bits, as a CPU int64 of no dims: reads each byte once, keeps no copy."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.numel() == 0:
        return torch.tensor(0)
    if local.is_complex():
        local = torch.view_as_real(local)
    whole = local.detach().contiguous().flatten()
    widths = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return whole.view(widths[whole.element_size()]).sum(dtype=torch.int64).cpu()
