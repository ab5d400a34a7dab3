"""Batches over ranks: slices, samplers, and loaders of different lengths."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from ranks import run_ranks
from shardfit import ShardfitError
from shardfit.train.data import (
    SlicedBatches,
    local_batch_size,
    lockstep,
    make_sampler,
    mean_over_ranks,
    share_of,
    slice_batch,
)


class Pair(NamedTuple):
    x: torch.Tensor
    note: str


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    names: list[str]


def slices(ranks, num_rows, dim=0):
    x = torch.arange(num_rows * 3).view(num_rows, 3)
    x = x if dim == 0 else x.t().contiguous()
    batch, weight = slice_batch(x, ranks, dim=dim)
    return batch, weight, share_of(num_rows, ranks)


@pytest.mark.parametrize(("num_rows", "dim"), [(8, 0), (10, 0), (7, 1), (5, 0)])
def test_slices_are_the_batch_and_weights_make_its_mean(num_rows, dim):
    results = run_ranks(slices, world=4, num_rows=num_rows, dim=dim)
    x = torch.arange(num_rows * 3).view(num_rows, 3)
    assert torch.equal(torch.cat([part if dim == 0 else part.t() for part, _, _ in results]), x)
    sizes = [part.shape[dim] for part, _, _ in results]
    assert max(sizes) - min(sizes) <= 1
    mean = sum(part.float().mean() * weight for part, weight, _ in results) / 4
    assert mean == pytest.approx(x.float().mean().item())
    assert [share.start for _, _, share in results] == [sum(sizes[:i]) for i in range(4)]


def test_fewer_rows_than_ranks():
    results = run_ranks(slices, world=4, num_rows=2)
    assert [weight for _, weight, _ in results] == [2.0, 2.0, 0.0, 0.0]
    assert all(part.shape == (1, 3) for part, _, _ in results)


def test_ranks_of_a_tensor_group_get_the_same_rows():
    results = run_ranks(slices, world=4, num_rows=6, init={"tensor": 2})
    assert [share.start for _, _, share in results] == [0, 0, 3, 3]


def nested(ranks):
    from transformers.modeling_outputs import CausalLMOutput
    from transformers.tokenization_utils_base import BatchEncoding

    x = torch.arange(8).view(4, 2)
    batch = {
        "pair": Pair(x, "kept"),
        "list": [x, torch.ones(3), torch.tensor(1.0)],
        "sample": Sample(x, ["a", "b", "c", "d"]),
        "ordered": OrderedDict(x=x),
        "output": CausalLMOutput(logits=x),
        "encoding": BatchEncoding({"input_ids": x}),
        "none": None,
        "number": 4,
    }
    part, weight = slice_batch(batch, ranks)
    mine = x[2 * ranks.rank :][:2]
    assert weight == 1.0
    assert isinstance(part["pair"], Pair)
    assert torch.equal(part["pair"].x, mine)
    assert part["pair"].note == "kept"
    assert [t.shape for t in part["list"]] == [(2, 2), (3,), ()]
    assert part["sample"].names == [["a", "b"], ["c", "d"]][ranks.rank]
    assert isinstance(part["ordered"], OrderedDict)
    assert isinstance(part["output"], CausalLMOutput)
    assert torch.equal(part["output"].logits, mine)
    assert torch.equal(part["encoding"]["input_ids"], mine)
    assert torch.equal(batch["encoding"]["input_ids"], x), "the batch given must stay as it was"
    assert part["none"] is None
    assert part["number"] == 4


def test_nested_batches_keep_their_types():
    run_ranks(nested)


def unusable(ranks):
    for batch in ("text", torch.zeros(0, 2)):
        with pytest.raises(ShardfitError):
            slice_batch(batch, ranks)
    with pytest.raises(ShardfitError, match="SF605"):
        local_batch_size(5, ranks)
    return local_batch_size(6, ranks), mean_over_ranks(torch.tensor(float(ranks.rank)), ranks).item()


def test_what_cannot_be_divided():
    assert run_ranks(unusable) == [(3, 0.5), (3, 0.5)]


DATA = TensorDataset(torch.arange(23).float())


def sampled(ranks):
    sampler = make_sampler(DATA, ranks)
    sampler.set_epoch(1)
    return list(sampler)


def test_samplers_divide_the_data_over_the_data_axes():
    results = run_ranks(sampled, world=4, init={"tensor": 2})
    assert results[0] == results[1]
    assert results[2] == results[3]
    assert set(results[0]) | set(results[2]) == set(range(23))
    assert len(results[0]) == 12


def batches_of_one_process():
    generator = torch.Generator().manual_seed(5)
    return BatchSampler(RandomSampler(DATA, generator=generator), 7, drop_last=False)


def sliced_loader(ranks, workers=0):
    loader = DataLoader(
        DATA, batch_sampler=SlicedBatches(batches_of_one_process(), ranks), num_workers=workers
    )
    assert len(loader) == 4
    first = [([int(v) for v in x], weight) for (x,), weight in lockstep(loader, ranks)]
    second = [([int(v) for v in x], weight) for (x,), weight in lockstep(loader, ranks)]
    return first, second


@pytest.mark.parametrize("workers", [0, 1])
def test_sliced_loader_gives_the_global_batches_of_one_process(workers):
    if workers:  # the ranks of tests may not have children
        places = [SimpleNamespace(data_rank=rank, data_world=3) for rank in range(3)]
        results = [sliced_loader(place, workers) for place in places]
    else:
        results = run_ranks(sliced_loader, world=3)
    expected = batches_of_one_process()
    for epoch in range(2):
        for step, batch in enumerate(expected):
            parts = [result[epoch][step] for result in results]
            assert [i for rows, weight in parts if weight for i in rows] == batch
            # The last batch has 2 rows for 3 ranks.
            assert sum(weight for _, weight in parts) == pytest.approx(3)


def uneven(ranks, sizes):
    model = fully_shard(nn.Linear(1, 1, bias=False), mesh=ranks.data_mesh)
    nn.init.ones_(model.weight)
    losses = []
    mine = [torch.full((n, 1), float(10 * ranks.rank + n)) for n in sizes[ranks.rank]]
    for batch, weight in lockstep(iter(mine), ranks):
        loss = model(batch).mean() * weight
        loss.backward()
        losses.append(mean_over_ranks(loss, ranks).item())
    return losses


def test_lockstep_over_loaders_of_different_length_and_sizes():
    sizes = [[2, 2], [2, 3, 1, 4]]
    results = run_ranks(uneven, sizes=sizes)
    rows = [
        [2.0] * 2 + [12.0] * 2,
        [2.0] * 2 + [13.0] * 3,
        [11.0],
        [14.0] * 4,
    ]
    expected = [sum(step) / len(step) for step in rows]
    assert results[0] == results[1] == pytest.approx(expected)


def faulty(ranks):
    def broken():
        yield torch.ones(1)
        raise OSError("disk")

    loader = broken() if ranks.rank == 1 else [torch.ones(1)] * 3
    batches = lockstep(loader, ranks)
    next(batches)
    with pytest.raises((OSError, ShardfitError)) as caught:
        next(batches)
    with pytest.raises(ShardfitError, match="SF604"):
        next(lockstep([torch.ones(1)] if ranks.rank == 0 else [], ranks))
    return type(caught.value).__name__


def test_a_loader_that_fails_ends_the_loop_on_all_ranks():
    assert run_ranks(faulty) == ["ShardfitError", "OSError"]
