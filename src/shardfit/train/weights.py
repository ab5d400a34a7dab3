"""load_weights: pretrained weights into a sharded model, each rank reading its own slice."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardfit.errors import ShardfitError
from shardfit.train.stored import Stored, num_rows, open_weights, row_bytes

# Read at a time where the file's dtype or device is not the shard's.
STAGE_BYTES = 64 * 2**20


class Loaded(NamedTuple):
    """What `load_weights` did.

    Attributes:
        loaded: names of the model that were written.
        casts: name -> "float32 -> bfloat16", for values stored in another dtype.
        missing: names of the model that the file doesn't have, left as they were. Names that
            are tied to one that it has don't count.
        unexpected: names in the file that the model doesn't have.
    """

    loaded: tuple[str, ...]
    casts: dict[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@dataclass(frozen=True)
class _Target:
    """A tensor of the model: one for all names that are tied."""

    names: tuple[str, ...]
    tensor: torch.Tensor


def load_weights(
    model: nn.Module,
    source: str | os.PathLike[str],
    *,
    strict: bool = True,
    rename: Callable[[str], str | None] | None = None,
) -> Loaded:
    """Write weights from `source` into `model`, sharded or not, in place.

    Each rank reads its own rows, straight into its shard where dtype and device agree. No
    collective is needed, and no rank holds a whole parameter (but for parameters that a
    tensor axis has split: each rank reads those whole, one at a time).

    Args:
        model: its tensors must be allocated; for a deferred or meta model call
            shard(model, ..., weights=source) instead.
        source: a safetensors file; a file of torch.save (read with weights_only, mapped); or a
            folder of them, with the index of a Hugging Face checkpoint where there is one.
        strict: False leaves missing and unexpected names to be looked at in the result.
        rename: the model's name for a name in the file; None drops it.

    Raises:
        ShardfitError: names that are missing or unexpected, shapes or kinds of dtype that
            differ, a torn file, two different values for tied weights: everything that is
            wrong in one error, before anything is written.
    """
    stored = open_weights(source)
    named: dict[str, Stored] = {}
    for name, entry in stored.items():
        renamed = rename(name) if rename else name
        if renamed in named:
            raise ShardfitError(
                "two stored tensors have the same name after renaming", evidence=f"{renamed}, from {name}"
            )
        if renamed is not None:
            named[renamed] = entry
    targets = _targets(model)
    chosen, result = _match(targets, named, strict=strict, source=str(source))
    _refuse_untied(chosen, named)
    for target, name in chosen:
        _write(target.tensor, named[name])
    return result


def allocate(model: nn.Module, names: Collection[str], *, device: torch.device) -> None:
    """Give memory on `device` to meta parameters and buffers named in `names`, or tied to such.

    The parameter objects are new ones, with unwritten values.
    """
    wanted = {id(tensor) for name, tensor in _all_tensors(model) if name in names and tensor.is_meta}
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if id(tensor) in wanted:
                if id(tensor) not in made:
                    made[id(tensor)] = _empty_like(tensor, device)
                setattr(module, name, made[id(tensor)])


def _all_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        local = torch.empty_like(tensor.to_local(), device=device)
        empty: torch.Tensor = DTensor.from_local(
            local,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    else:
        empty = torch.empty_like(tensor, device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _targets(model: nn.Module) -> list[_Target]:
    groups: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            groups.setdefault(id(tensor), (tensor, []))[1].append(name)
    return [_Target(tuple(names), tensor) for tensor, names in groups.values()]


def _match(
    targets: list[_Target], named: dict[str, Stored], *, strict: bool, source: str
) -> tuple[list[tuple[_Target, str]], Loaded]:
    """What to read into what; or one error that lists all that does not fit."""
    chosen: list[tuple[_Target, str]] = []
    casts: dict[str, str] = {}
    missing: list[str] = []
    faults: list[str] = []
    for target in targets:
        name = next((name for name in target.names if name in named), None)
        if name is None:
            missing += target.names
            continue
        entry, tensor = named[name], target.tensor
        if tensor.is_meta:
            faults.append(f"{name} is on the meta device")
        elif entry.shape != tuple(tensor.shape):
            faults.append(f"{name}: stored {list(entry.shape)}, model {list(tensor.shape)}")
        elif _kind(entry.dtype) != _kind(tensor.dtype):
            faults.append(f"{name}: stored {entry.dtype}, model {tensor.dtype}")
        elif entry.dtype != tensor.dtype:
            casts[name] = f"{_short(entry.dtype)} -> {_short(tensor.dtype)}"
        chosen.append((target, name))
    known = {name for target in targets for name in target.names}
    unexpected = [name for name in named if name not in known]
    if strict:
        faults += [f"missing: {name}" for name in missing] + [f"unexpected: {name}" for name in unexpected]
    if faults:
        raise ShardfitError(
            f"the stored weights don't fit the model, in {len(faults)} places; nothing was written",
            evidence=f"{source}: " + "; ".join(faults[:20]) + ("; ..." if len(faults) > 20 else ""),
            fix="rename= maps stored names to the model's; strict=False accepts missing and unexpected "
            "names; for a meta or deferred model, shard(model, ..., weights=...)",
        )
    loaded = tuple(name for _, name in chosen)
    return chosen, Loaded(loaded, casts, tuple(missing), tuple(unexpected))


def _kind(dtype: torch.dtype) -> str:
    return "complex" if dtype.is_complex else "float" if dtype.is_floating_point else "integer"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refuse_untied(chosen: list[tuple[_Target, str]], named: dict[str, Stored]) -> None:
    """Tied weights that are stored twice must be stored alike, on all ranks alike."""
    pairs = [
        (target, name, other)
        for target, name in chosen
        for other in target.names
        if other != name and other in named
    ]
    if not pairs:
        return
    differ = torch.zeros(len(pairs))
    for index, (target, name, other) in enumerate(pairs):
        first, last = _rows(target.tensor)
        if named[other].shape != named[name].shape or not torch.equal(
            named[name].read(first, last), named[other].read(first, last)
        ):
            differ[index] = 1
    if dist.is_initialized() and dist.get_world_size() > 1:
        everywhere: list[torch.Tensor | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, differ)
        differ = torch.stack([flags for flags in everywhere if flags is not None]).amax(0)
    if names := [f"{name} and {other}" for flag, (_, name, other) in zip(differ, pairs, strict=True) if flag]:
        raise ShardfitError(
            "weights that are tied in the model are stored with different values; nothing was written",
            evidence="; ".join(names),
            fix="untie them before shard, or drop one with rename=",
            code="SF204",
        )


def _rows(tensor: torch.Tensor) -> tuple[int, int]:
    """The rows of dim 0, from and to, that this rank holds of a tensor that is split by rows or whole."""
    whole = tensor.shape[0] if tensor.ndim else 1
    if not isinstance(tensor, DTensor) or not _split_by_rows(tensor):
        return 0, whole
    place = tensor.device_mesh.get_coordinate()
    assert place is not None, "this rank is not in the mesh"
    for dim, placement in enumerate(tensor.placements):
        if type(placement) is Shard:
            size = -(-whole // tensor.device_mesh.size(dim))
            return min(place[dim] * size, whole), min((place[dim] + 1) * size, whole)
    return 0, whole


def _split_by_rows(tensor: DTensor) -> bool:
    """Whether at most one mesh dim splits it, along dim 0, as FSDP does."""
    split = [p for p in tensor.placements if not isinstance(p, Replicate)]
    return not split or (len(split) == 1 and type(split[0]) is Shard and split[0].dim == 0)


@torch.no_grad()
def _write(tensor: torch.Tensor, entry: Stored) -> None:
    if isinstance(tensor, DTensor) and not _split_by_rows(tensor):
        whole = entry.read(0, num_rows(entry)).to(tensor.device, tensor.dtype)
        mine = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.to_local().copy_(mine.to_local())
        return
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    first, last = _rows(tensor)
    if local.dtype == entry.dtype and local.device.type == "cpu" and local.is_contiguous():
        entry.read_into(local, first)
        return
    for start, stop in _stages(first, last, entry):
        piece = local[start - first : stop - first] if local.ndim else local
        piece.copy_(entry.read(start, stop))


def _stages(first: int, last: int, entry: Stored) -> Iterator[tuple[int, int]]:
    step = max(1, STAGE_BYTES // max(1, row_bytes(entry)))
    for start in range(first, last, step):
        yield start, min(start + step, last)
