"""Gradient norms and clipping: the whole gradient's norm, right to seven digits, with one collective."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from shardfit import _torch
from shardfit.errors import ShardfitError

# torch's norm sums float32 in float32: over 2 M elements it is off by 2e-4 on a CPU. Norms of
# rows of this many elements are right to 1e-8, and cost the same pass over the memory.
ROW = 4096
_SHORT = 4 * ROW


def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients in place so that the norm of all of them together is at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_`, but for sharded parameters the norms of the local parts
    meet in one collective, the norm is right to 1e-6 whatever the sizes (torch's is off by up to
    6e-4 on a CPU), and what comes back is a plain tensor. Call it once, after the last
    micro-batch's backward, on all ranks; with a GradScaler after `unscale_`.

    Nothing waits for the device unless `error_if_nonfinite`.

    Args:
        parameters: the model, a parameter, or parameters. Those without gradient don't count.
        max_norm: the factor is min(1, max_norm / (norm + 1e-6)), as in torch.
        norm_type: p of the p-norm; math.inf is the largest magnitude.
        error_if_nonfinite: raise where the norm is nan or infinite.

    Returns:
        The norm before clipping: float32, no dims, on the gradients' device, the same on all ranks.

    Raises:
        ShardfitError: a norm that is not finite, if asked for.
    """
    grads = _gradients(parameters)
    norm, _ = reduce_norm(grads, norm_type=norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise ShardfitError(
            "the gradient's norm is not finite, so it can't be clipped",
            evidence=f"norm {float(norm)} over {len(grads)} gradients",
            fix="look for a loss that is nan or infinite, or skip the step as train_step does",
        )
    scale_to_norm(grads, norm, max_norm)
    return norm


def grad_norm(parameters: nn.Module | Tensor | Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients together, as `clip_grad_norm_` returns it; nothing is changed."""
    return reduce_norm(_gradients(parameters), norm_type=norm_type)[0]


def scale_to_norm(grads: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiply `grads` in place by min(1, max_norm / (norm + 1e-6))."""
    parts = [_torch.local_of(grad) for grad in grads]
    for device in {part.device for part in parts}:
        on_device = [part for part in parts if part.device == device]
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).to(device)
        # A CPU value can be read for nothing, and most steps need no clipping.
        if device.type != "cpu":
            _torch.multiply_all(on_device, factor)
        elif not (number := float(factor)) >= 1.0:
            _torch.multiply_all(on_device, number)


@torch.no_grad()
def reduce_norm(
    grads: Sequence[Tensor],
    *,
    norm_type: float = 2.0,
    along: Tensor | None = None,
    along_groups: Sequence[dist.ProcessGroup] = (),
) -> tuple[Tensor, Tensor | None]:
    """The norm over all ranks, and `along` (1-D float64) summed over `along_groups`.

    Where both need the same group they share a collective.
    """
    buckets = _bucket(grads, norm_type)
    groups = {id(group): group for bucket in buckets for group in bucket.groups}
    if not groups:
        total = _sum([bucket.power for bucket in buckets], norm_type, grads, along)
        return _root(total, norm_type), _reduce_along(along, along_groups)
    op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    sizes = [group.size() for group in groups.values()]
    if len(groups) == 1:
        (group,) = groups.values()
        parts = _sum([b.power for b in buckets if b.groups], norm_type, grads, along)[None]
        if along is not None and op is dist.ReduceOp.SUM and [group] == list(along_groups):
            parts = torch.cat([parts, along.to(parts.device)])
            dist.all_reduce(parts, op=op, group=group)
            along, along_groups = parts[1:], ()
        else:
            dist.all_reduce(parts, op=op, group=group)
        whole = [parts[0], *(b.power for b in buckets if not b.groups)]
    elif math.prod(sizes) == dist.get_world_size():
        # The axes span the world: one collective over it, in which a bucket that is not sharded
        # on an axis is counted as often as that axis has ranks.
        counted = [b.power / _copies(b.groups, op) for b in buckets]
        parts = _sum(counted, norm_type, grads, along)[None]
        dist.all_reduce(parts, op=op)
        whole = [parts[0]]
    else:
        values = torch.stack([b.power for b in buckets])
        for key, group in groups.items():
            members = [i for i, b in enumerate(buckets) if key in map(id, b.groups)]
            part = values[members]
            dist.all_reduce(part, op=op, group=group)
            values[members] = part
        whole = list(values)
    total = _sum(whole, norm_type, grads, along)
    return _root(total, norm_type), _reduce_along(along, along_groups)


@dataclass
class _Bucket:
    """Gradients that are sharded over the same groups: the p-th power of their local norm."""

    power: Tensor
    groups: tuple[dist.ProcessGroup, ...]


def _gradients(parameters: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, Tensor):
        parameters = [parameters]
    return [p.grad for p in parameters if p.grad is not None]


def _bucket(grads: Sequence[Tensor], norm_type: float) -> list[_Bucket]:
    parts: dict[object, list[Tensor]] = {}
    places: dict[object, tuple[dist.ProcessGroup, ...]] = {}
    for grad in grads:
        if not isinstance(grad, DTensor):
            key: object = None
            places[key] = ()
        else:
            mesh = grad.device_mesh
            if any(placement.is_partial() for placement in grad.placements):
                whole = [Replicate() if p.is_partial() else p for p in grad.placements]
                grad = grad.redistribute(placements=whole)
            key = (id(mesh), grad.placements)
            if key not in places:
                sharded = [dim for dim, p in enumerate(grad.placements) if not p.is_replicate()]
                places[key] = tuple(mesh.get_group(dim) for dim in sharded if mesh.size(dim) > 1)
        parts.setdefault(key, []).append(_torch.local_of(grad))
    return [_Bucket(_power(parts[key], norm_type), places[key]) for key in parts]


def _power(parts: Sequence[Tensor], norm_type: float) -> Tensor:
    """Sum of |x|**p over all elements, float64, no dims; the largest |x| for p = inf."""
    device = parts[0].device
    parts = [part for part in parts if part.numel()]
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms: list[Tensor] = []
    short: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for part in parts:
        if part.device.type == "cpu" and part.numel() > _SHORT and part.is_contiguous():
            flat = part.view(-1)
            end = flat.numel() // ROW * ROW
            rows = torch.linalg.vector_norm(flat[:end].view(-1, ROW), norm_type, dim=1, dtype=_wide(part))
            norms.append(rows.to(device, torch.float64))
            part = flat[end:]
        if part.numel():
            short.setdefault((part.device, part.dtype), []).append(part)
    for alike in short.values():
        each = torch.stack(_torch.norms_of(alike, norm_type, _wide(alike[0])))
        norms.append(each.to(device, torch.float64))
    every = torch.cat(norms)
    if math.isinf(norm_type):
        return every.max()
    return every.square().sum() if norm_type == 2.0 else every.pow(norm_type).sum()


def _wide(tensor: Tensor) -> torch.dtype:
    """What to sum in: at least float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _sum(powers: Sequence[Tensor], norm_type: float, grads: Sequence[Tensor], along: Tensor | None) -> Tensor:
    if not powers:
        device = grads[0].device if grads else along.device if along is not None else None
        return torch.zeros((), dtype=torch.float64, device=device)
    together = torch.stack([power.to(powers[0].device) for power in powers])
    return together.max() if math.isinf(norm_type) else together.sum()


def _root(power: Tensor, norm_type: float) -> Tensor:
    if math.isinf(norm_type):
        return power.float()
    return (power.sqrt() if norm_type == 2.0 else power.pow(1.0 / norm_type)).float()


def _copies(groups: Sequence[dist.ProcessGroup], op: dist.ReduceOp.RedOpType) -> float:
    """How many ranks of the world hold the same part."""
    if op is not dist.ReduceOp.SUM:
        return 1.0
    return dist.get_world_size() / math.prod(group.size() for group in groups)


def _reduce_along(along: Tensor | None, groups: Sequence[dist.ProcessGroup]) -> Tensor | None:
    if along is not None:
        for group in groups:
            dist.all_reduce(along, group=group)
    return along
