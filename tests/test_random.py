"""Seeds, states, and draws: of the global batch, or each rank its own."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from ranks import run_ranks
from shardfit.train.data import share_of
from shardfit.train.random import global_draws, random_state, rank_draws, seed_all, set_random_state

ROWS, TIME, WIDTH = 7, 5, 8


class Noisy(nn.Module):
    """Dropout of every kind; rows in dim 0."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.3, batch_first=True)

    def forward(self, x):
        x = F.dropout(x, 0.5)
        x, _ = self.lstm(x)
        x = x + self.attention(x, x, x)[0]  # folds heads into the batch
        x = self.layer(x) + torch.randn_like(x) + torch.rand(x.shape[0], 1, 1)
        x = F.dropout(x.transpose(1, 2), 0.5).transpose(1, 2)  # another order in memory
        x = x * torch.bernoulli(torch.sigmoid(x)) + F.gumbel_softmax(x, dim=-1)
        x = F.dropout2d(x.unsqueeze(1), 0.5).squeeze(1) + torch.randn(TIME, WIDTH)
        return x + torch.multinomial(x[:, 0].softmax(-1), 1).unsqueeze(-1)


class TimeFirst(nn.Module):
    """Rows in dim 1, and folded behind time."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5)

    def forward(self, x):
        x, _ = self.lstm(F.dropout(x, 0.5))
        return F.dropout(x.flatten(0, 1), 0.5).view_as(x)


def run_whole(kind):
    torch.manual_seed(3)
    model = kind()
    x = torch.randn(ROWS, TIME, WIDTH) if kind is Noisy else torch.randn(TIME, ROWS, WIDTH)
    out = model(x)
    out.square().sum().backward()
    return x, out.detach(), [p.grad for p in model.parameters()], torch.get_rng_state()


def run_part(ranks, kind, dim):
    torch.manual_seed(3)
    model = kind()
    rows_dim = 0 if kind is Noisy else 1
    x = torch.randn(ROWS, TIME, WIDTH) if kind is Noisy else torch.randn(TIME, ROWS, WIDTH)
    share = share_of(ROWS, ranks)
    with global_draws(total_rows=ROWS, start_row=share.start, num_rows=share.num_rows, dim=dim):
        out = model(x.narrow(rows_dim, share.start, share.num_rows))
    return out.detach(), torch.get_rng_state()


@pytest.mark.parametrize(("kind", "dim"), [(Noisy, None), (TimeFirst, 1)])
@pytest.mark.parametrize("world", [2, 3])
def test_global_draws_are_those_of_one_process(kind, dim, world):
    _, whole, _, state = run_whole(kind)
    results = run_ranks(run_part, world=world, kind=kind, dim=dim)
    parts = torch.cat([part for part, _ in results], dim=0 if kind is Noisy else 1)
    # Products of fewer rows round differently; another mask would differ by far more.
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(mine, state) for _, mine in results)


def masks(ranks, num_rows, total):
    share = share_of(total, ranks)
    with global_draws(total_rows=total, start_row=share.start, num_rows=share.num_rows):
        return F.dropout(torch.ones(num_rows[ranks.rank], 100), 0.5), torch.native_dropout(
            torch.ones(num_rows[ranks.rank] * 3, 4), 0.5, True
        )[1]


def test_masks_are_equal_to_the_bit():
    torch.manual_seed(0)
    whole = F.dropout(torch.ones(5, 100), 0.5), torch.native_dropout(torch.ones(15, 4), 0.5, True)[1]
    results = run_ranks(masks, num_rows=[3, 2], total=5)
    for index in range(2):
        assert torch.equal(torch.cat([result[index] for result in results]), whole[index])


def own_draws(ranks):
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4))
    fully_shard(model, mesh=ranks.data_mesh)
    seen = []
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.detach().clone()))
    handle = rank_draws(model, ranks)
    seed_all(7)
    x = torch.ones(16, 4)
    outside = [torch.rand(())]
    for _ in range(2):
        model(x).sum().backward()
        outside.append(torch.rand(()))
    before = torch.get_rng_state()
    model.eval()
    model(x).sum().backward()
    assert torch.equal(before, torch.get_rng_state()), "a forward without draws must leave the state alone"
    state = pickle.loads(pickle.dumps(random_state()))
    model.train()
    model(x)
    set_random_state(state)
    model(x)
    model(x)  # nothing has been drawn outside since
    handle.remove()
    model(x)
    masks = [s for i, s in enumerate(seen) if i != 2]
    return masks, torch.stack(outside)


def test_each_data_rank_draws_its_own_in_the_forward_only():
    results = run_ranks(own_draws, world=4, init={"tensor": 2})
    masks = [result[0] for result in results]
    assert all(torch.equal(results[0][1], other) for _, other in results), "outside, all draw alike"
    for call in range(5):
        assert torch.equal(masks[0][call], masks[1][call]), "one tensor group"
        assert not torch.equal(masks[0][call], masks[2][call])
    for rank in (0, 2):
        assert not torch.equal(masks[rank][0], masks[rank][1]), "another mask in each step"
        assert torch.equal(masks[rank][2], masks[rank][3]), "the state outside is all there is"
        assert not torch.equal(masks[rank][3], masks[rank][4]), "also if nothing is drawn outside"
    assert torch.equal(masks[0][5], masks[2][5]), "removed"


def seeds(ranks):
    values = []
    for given in (None, ranks):
        seed_all(11, given)
        values.append((random.random(), float(np.random.rand()), torch.rand(()).item()))
    return values


def test_seeds_alike_and_by_data_rank():
    results = run_ranks(seeds, world=4, init={"tensor": 2})
    assert len({alike for alike, _ in results}) == 1
    assert results[0][1] == results[1][1]
    assert all(a != b for a, b in zip(results[0][1], results[2][1], strict=True))


def test_state_restores_every_generator():
    seed_all(1)
    state = pickle.loads(pickle.dumps(random_state()))
    first = (random.random(), np.random.rand(), torch.rand(3))
    set_random_state(state)
    again = (random.random(), np.random.rand(), torch.rand(3))
    assert first[:2] == again[:2]
    assert torch.equal(first[2], again[2])
