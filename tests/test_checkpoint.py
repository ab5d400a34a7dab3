"""Checkpointer: what is saved comes back, at any world size, mesh and division into units."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ranks import run_ranks
from shardfit import Checkpointer

WORLD_SIZES = [1, 2, 4]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Tied embedding, a frozen parameter, one that no gradient reaches, both kinds of buffer."""

    def __init__(self, width: int = 6, words: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(5))
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("ramp", torch.arange(3.0), persistent=False)

    def forward(self, ids):
        self.seen += 1
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale.sum() * self.ramp[1]


def build(ranks=None, *, units="blocks", seed=0, cls=torch.optim.AdamW, split=False, **options):
    """A model, an optimizer and two schedulers; the weights depend on the seed only."""
    for seeder in (random.seed, np.random.seed, torch.manual_seed):
        seeder(seed)
    model = Net()
    if ranks is not None:
        if "tensor" in ranks.mesh.mesh_dim_names:
            layout = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
            parallelize_module(model, ranks.mesh["tensor"], layout)
        frozen = {model.scale}
        if units == "blocks":
            for block in model.blocks:
                fully_shard(block, mesh=ranks.data_mesh)
        fully_shard(model, mesh=ranks.data_mesh, ignored_params=frozen)
    named = dict(model.named_parameters())
    if split:  # other groups, in another order
        groups = [
            {
                "params": [p for n, p in reversed(named.items()) if "norm" in n],
                "weight_decay": 0.0,
                "lr": 0.02,
            },
            {"params": [p for n, p in named.items() if "norm" not in n and "blocks" in n]},
            {"params": [p for n, p in named.items() if "blocks" not in n]},
        ]
    else:
        groups = [
            {"params": [p for n, p in named.items() if "norm" not in n]},
            {"params": [p for n, p in named.items() if "norm" in n], "weight_decay": 0.0, "lr": 0.02},
        ]
    optimizer = cls(groups, **{"lr": 0.05, **options})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return model, optimizer, scheduler


def train(model, optimizer, scheduler, steps):
    """Every rank does the whole batch, so that results are those of one process."""
    losses = []
    for step in steps:
        ids = torch.randint(0, 7, (4, 3), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def whole(value):
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def snapshot(model, optimizer, scheduler):
    """Everything that a resume must bring back, by name, in whole plain tensors."""
    names = {param: name for name, param in model.named_parameters()}
    return {
        "model": {name: whole(value) for name, value in model.state_dict().items()},
        "state": {
            names[param]: {key: whole(value) for key, value in state.items()}
            for param, state in optimizer.state.items()
        },
        "hyper": {
            names[param]: (group["lr"], group["weight_decay"], group["initial_lr"])
            for group in optimizer.param_groups
            for param in group["params"]
        },
        "scheduler": (scheduler.last_epoch, scheduler._step_count),
        "base_lr": {
            names[param]: (base, last)
            for group, base, last in zip(
                optimizer.param_groups, scheduler.base_lrs, scheduler.get_last_lr(), strict=True
            )
            for param in group["params"]
        },
    }


def assert_same(one, other, path=""):
    assert type(one) is type(other), path
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, path
        assert torch.equal(one, other), path
    else:
        assert one == other, path


def save_body(ranks, folder, build_options):
    parts = build(ranks, **build_options)
    train(*parts, range(3))
    model, optimizer, scheduler = parts
    Checkpointer(folder, model=model, optimizer=optimizer, scheduler=scheduler).save(3)
    taken = snapshot(*parts)
    return taken, train(*parts, range(3, 5))


def resume_body(ranks, folder, build_options):
    parts = build(ranks, **{**build_options, "seed": 7})
    model, optimizer, scheduler = parts
    step = Checkpointer(folder, model=model, optimizer=optimizer, scheduler=scheduler).resume()
    taken = snapshot(*parts)
    return step, taken, train(*parts, range(3, 5))


def resume_alone(folder, **build_options):
    return resume_body(None, folder, build_options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of one training at several shapes, made once."""
    made = {}

    def get(world, **init):
        key = (world, *init.items())
        if key not in made:
            folder = tmp_path_factory.mktemp("saved")
            results = run_ranks(save_body, world=world, init=init, folder=folder, build_options={})
            made[key] = (folder, *results[0])
        return made[key]

    return get


SHAPES = [(1, {}), (2, {}), (4, {}), (4, {"replicate": 2}), (4, {"tensor": 2})]
ROUTES = [
    (SHAPES[1], SHAPES[1], {}),
    (SHAPES[1], SHAPES[2], {}),
    (SHAPES[2], SHAPES[1], {"units": "root"}),
    (SHAPES[2], SHAPES[3], {"split": True}),
    (SHAPES[3], SHAPES[4], {}),
    (SHAPES[4], SHAPES[2], {"units": "root", "split": True}),
    (SHAPES[4], SHAPES[0], {}),
    (SHAPES[1], None, {}),
    (SHAPES[4], None, {"split": True}),
]


@pytest.mark.parametrize(("source", "target", "options"), ROUTES)
def test_resume_at_another_shape(saved, source, target, options):
    world, init = source
    folder, before, losses = saved(world, **init)
    if target is None:
        results = [resume_alone(folder, **options)]
    else:
        results = run_ranks(
            resume_body, world=target[0], init=target[1], folder=folder, build_options=options
        )
    for step, after, resumed in results:
        assert step == 3
        assert_same(before, after)
        assert resumed == pytest.approx(losses, rel=1e-5)
