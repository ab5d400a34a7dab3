"""Batches over ranks: the global batch stays the script's, each data rank gets its rows of it.

Ranks that differ only on the mesh's "tensor" axis compute parts of the same samples, so they
get the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset, DistributedSampler

from shardfit.errors import ShardfitError
from shardfit.train.launch import Ranks
from shardfit.train.nested import map_nested, tensors_in


class Share(NamedTuple):
    """A rank's rows of a batch.

    Attributes:
        start: its first row in the global batch.
        num_rows: how many it computes on; at least 1.
        total_rows: rows of the global batch.
        weight: share of the global mean that they stand for, times the number of data ranks:
            0.0 on a rank for which no row is left, which computes row 0 as a dummy.
    """

    start: int
    num_rows: int
    total_rows: int
    weight: float


class BatchSlice(NamedTuple):
    """This rank's rows, and `weight` with which its mean loss counts.

    `weight * loss`, averaged over the data ranks as FSDP averages gradients, is the mean over
    the global batch.
    """

    batch: Any
    weight: float


def share_of(total_rows: int, ranks: Ranks) -> Share:
    """The rows of a global batch that fall to this rank: in order, sizes differing by one at most."""
    if total_rows < 1:
        raise ShardfitError(
            "an empty batch can't be divided", evidence=f"{total_rows} rows", fix="leave empty batches out"
        )
    each, more = divmod(total_rows, ranks.data_world)
    place = ranks.data_rank
    num_rows = each + (place < more)
    if num_rows == 0:
        return Share(0, 1, total_rows, 0.0)
    start = place * each + min(place, more)
    return Share(start, num_rows, total_rows, num_rows * ranks.data_world / total_rows)


def slice_batch(batch: Any, ranks: Ranks, *, dim: int = 0, rows: int | None = None) -> BatchSlice:
    """This rank's rows of a global batch that every rank holds, and their weight.

    Args:
        batch: tensors in tuples, lists, dicts, dataclasses or mappings (ModelOutput,
            BatchEncoding), nested. Tensors whose size at `dim` is the number of rows are cut (views),
            and so are lists of that many strings. Everything else is kept as it is.
        ranks: of init_distributed.
        dim: the batch's dimension.
        rows: rows of the global batch. None: the size at `dim` of the first tensor that has it.

    Returns:
        `BatchSlice(batch, weight)`. With fewer rows than data ranks, those without get one dummy
        row and weight 0.0: collectives need every rank in the forward.

    Raises:
        ShardfitError: no tensor with that dim, or an empty batch.
    """
    if rows is None:
        rows = next((t.shape[dim] for t in tensors_in(batch) if t.ndim > dim), None)
    if rows is None:
        raise ShardfitError(
            "a batch without a tensor can't be divided",
            evidence=f"{type(batch).__name__}, no tensor has dim {dim}",
            fix="give rows=, or the dim that is the batch's",
        )
    share = share_of(rows, ranks)

    def cut(item: Any) -> Any:
        if isinstance(item, Tensor):
            has_rows = item.ndim > dim and item.shape[dim] == rows
            return item.narrow(dim, share.start, share.num_rows) if has_rows else item
        return item[share.start : share.start + share.num_rows]

    return BatchSlice(map_nested(batch, cut, rows), share.weight)


def mean_over_ranks(value: Tensor, ranks: Ranks) -> Tensor:
    """The mean of `value` over the data ranks, for printing and deciding: detached, any shape.

    Of `weight * loss` it is the loss of the global batch. A collective call: on all ranks.
    """
    total = value.detach().clone()
    if isinstance(total, DTensor):
        total = total.full_tensor()
    for group in data_groups(ranks):
        dist.all_reduce(total, group=group)
    return total / ranks.data_world


def data_groups(ranks: Ranks) -> list[dist.ProcessGroup]:
    """Groups over which a sum is a sum over the data ranks."""
    if ranks.data_world == 1:
        return []
    if ranks.data_world == ranks.world and ranks.mesh.ndim > 1:
        assert dist.group.WORLD is not None
        return [dist.group.WORLD]
    mesh = ranks.data_mesh
    return [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]


# Samplers and loaders


def local_batch_size(batch_size: int, ranks: Ranks) -> int:
    """Rows that each rank's loader takes, so that a step sees `batch_size` rows in all.

    Raises:
        ShardfitError: it can't be divided evenly (SF605).
    """
    if batch_size < 1 or batch_size % ranks.data_world:
        raise ShardfitError(
            "the batch can't be divided evenly over the data ranks",
            evidence=f"batch size {batch_size}, {ranks.data_world} data ranks",
            fix="use slice_batch or SlicedBatches, which weight uneven parts, or another batch size",
            code="SF605",
        )
    return batch_size // ranks.data_world


def make_sampler(
    dataset: Dataset[Any], ranks: Ranks, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
) -> DistributedSampler[Any]:
    """torch's DistributedSampler on the data axes of the mesh: each rank loads its own samples.

    For a loader with `batch_size=local_batch_size(batch_size, ranks)`. Call `set_epoch` at the
    start of each epoch. Its order is not that of the script on one device, and unless `drop_last`
    it repeats a few samples so that all ranks have as many; `SlicedBatches` does neither.
    """
    return DistributedSampler(
        dataset,
        num_replicas=ranks.data_world,
        rank=ranks.data_rank,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )


class SlicedBatches:
    """A batch sampler that gives each rank its rows of the batches of another one.

        batches = BatchSampler(RandomSampler(data, generator=generator), batch_size, drop_last=False)
        loader = DataLoader(data, batch_sampler=SlicedBatches(batches, ranks))
        for batch, weight in lockstep(loader, ranks):

    The global batches, their order and the last short one are those of the script on one device;
    each sample is loaded once. The inner sampler must give the same on every rank: seed it alike.

    Attributes:
        weights: of the batches given since the last `iter()`, see `BatchSlice`.
    """

    def __init__(self, batches: Iterable[Sequence[int]], ranks: Ranks) -> None:
        self.batches = batches
        self.ranks = ranks
        self.weights: list[float] = []

    def __iter__(self) -> Iterator[list[int]]:
        self.weights = weights = []
        for batch in self.batches:
            indices = list(batch)
            share = share_of(len(indices), self.ranks)
            weights.append(share.weight)
            yield indices[share.start : share.start + share.num_rows]

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]


def lockstep(
    loader: Iterable[Any],
    ranks: Ranks,
    *,
    rows: Callable[[Any], int] | None = None,
) -> Iterator[BatchSlice]:
    """The batches of each rank's own loader, for as many steps on all ranks as the longest has.

    Before each step the ranks tell each other how many rows they have (one collective of two
    numbers on the CPU; none if the loader's batch sampler is a `SlicedBatches`). A rank that has
    run out gets its last batch once more with weight 0.0. So nothing hangs, nothing is dropped,
    and batches of different sizes count by their rows. Where one rank's loader raises, all ranks
    leave at that step.

    Args:
        loader: anything that can be iterated.
        rows: how many rows a batch has. None: size 0 of its first tensor.

    Yields:
        `BatchSlice(batch, weight)`; use `weight * loss`, or give them to `train_step`.

    Raises:
        ShardfitError: a rank has no batch at all, or the loader of another rank raised (SF604).
    """
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, SlicedBatches):
        for number, batch in enumerate(loader):
            yield BatchSlice(batch, sampler.weights[number])
        return
    count = rows or _num_rows
    batches = iter(loader)
    last: Any = None
    step = 0
    while True:
        failure: Exception | None = None
        num_rows = 0
        try:
            batch = next(batches, _END)
            num_rows = count(batch) if batch is not _END else 0
        except Exception as error:
            failure = error
        total, failures, empty = _agree(num_rows, failure is not None, last is None and not num_rows, ranks)
        if failure is not None:
            raise failure
        if failures:
            raise ShardfitError(
                "the loader of another rank failed",
                evidence=f"{failures} of {ranks.data_world} data ranks, at step {step}",
                fix="see the error of that rank",
                code="SF604",
            )
        if total == 0:
            return
        if empty:
            raise ShardfitError(
                "a rank has no batch at all, so it can't take part in a step",
                evidence=f"{empty} of {ranks.data_world} data ranks have none"
                + (", this one is among them" if last is None and not num_rows else ""),
                fix="divide the data so that each rank has at least one batch, or use SlicedBatches",
                code="SF604",
            )
        if num_rows:
            last = batch
        yield BatchSlice(last, num_rows * ranks.data_world / total)
        step += 1


_END = object()


def _agree(num_rows: int, failed: bool, is_empty: bool, ranks: Ranks) -> tuple[int, int, int]:
    """Sums over the data ranks."""
    groups = data_groups(ranks)
    on_cpu = all("cpu" in str(dist.get_backend_config(group)) for group in groups)
    values = torch.tensor(
        [num_rows, int(failed), int(is_empty)], device=torch.device("cpu") if on_cpu else ranks.device
    )
    for group in groups:
        dist.all_reduce(values, group=group)
    total, failures, empty = values.tolist()
    return total, failures, empty


def _num_rows(batch: Any) -> int:
    for tensor in tensors_in(batch):
        if tensor.ndim:
            return tensor.shape[0]
    raise ShardfitError(
        "can't tell how many rows a batch has",
        evidence=f"{type(batch).__name__} without a tensor",
        fix="give lockstep rows=, a function of a batch",
    )
