"""Checkpointer: state of optimizers of many kinds, at other world sizes than it was saved at."""

from __future__ import annotations

import pytest
import torch

from ranks import run_ranks
from shardfit import (
    Checkpointer,
    shard,
)
from shardfit.train.optimizer import build_optimizer, decay_matrices
from test_checkpoint import Net, assert_same, build, snapshot, train, whole

OPTIMIZERS = {
    "SGD": {},
    "SGD with momentum": {"momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {"fused": True},
    "Adagrad": {},
    "RMSprop": {"momentum": 0.1, "centered": True},
    "NAdam": {},
    "Adamax": {},
}


def optimizers_body(ranks, folder, save):
    """Train with each optimizer, save (or resume) on the way; the losses that follow."""
    losses = {}
    for name, options in OPTIMIZERS.items():
        cls = getattr(torch.optim, name.split()[0])
        parts = build(ranks, cls=cls, seed=0 if save else 3, lr=0.01, **options)
        model, optimizer, scheduler = parts
        checkpointer = Checkpointer(folder / name, model=model, optimizer=optimizer, scheduler=scheduler)
        if save:
            train(*parts, range(2))
            checkpointer.save(2)
        else:
            assert checkpointer.resume() == 2
        losses[name] = train(*parts, range(2, 4))
    return losses


def test_optimizers_at_another_world_size(tmp_path):
    expected = run_ranks(optimizers_body, world=2, folder=tmp_path, save=True)[0]
    for results in (
        run_ranks(optimizers_body, world=4, folder=tmp_path, save=False)[0],
        optimizers_body(None, tmp_path, save=False),
    ):
        assert results.keys() == expected.keys()
        for name, losses in results.items():
            assert losses == pytest.approx(expected[name], rel=2e-5), name


def built_body(ranks, folder, save, options):
    """The library's own pieces: shard, build_optimizer, train_step's clipping."""
    torch.manual_seed(0 if save else 3)
    model = shard(Net(), ranks=ranks)
    optimizer = build_optimizer(model, lr=0.05, groups=decay_matrices(model), **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    parts = model, optimizer, scheduler
    checkpointer = Checkpointer(folder, model=model, optimizer=optimizer, scheduler=scheduler)
    if save:
        train(*parts, range(2))
        checkpointer.save(2)
    else:
        assert checkpointer.resume() == 2
    before = snapshot(*parts)
    return before, train(*parts, range(2, 4))


@pytest.mark.parametrize("options", [{}, {"fused": False}], ids=["fused", "for each"])
def test_the_library_s_own_optimizer(options, tmp_path):
    before, losses = run_ranks(built_body, world=2, folder=tmp_path, save=True, options=options)[0]
    for world in (2, 4):
        for after, resumed in run_ranks(
            built_body, world=world, folder=tmp_path, save=False, options=options
        ):
            assert_same(before, after)
            assert resumed == pytest.approx(losses, rel=1e-5)


class Rows(torch.optim.Optimizer):
    """Keeps a mean for each row of a parameter: state of another shape, sharded its own way."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                rows = param.grad.reshape(param.shape[0], -1).square().mean(dim=1)
                state["rows"] = 0.9 * state["rows"] + rows if "rows" in state else rows
                state["history"] = {"sum": [rows.sum(), 1], 3: 4}
                param.sub_(param.grad, alpha=group["lr"])


def rows_body(ranks, folder, save):
    parts = build(ranks, cls=Rows, seed=0 if save else 3, lr=0.01)
    model, optimizer, scheduler = parts
    checkpointer = Checkpointer(folder, model=model, optimizer=optimizer, scheduler=scheduler)
    if save:
        train(*parts, range(2))
        checkpointer.save(2)
    else:
        checkpointer.resume()
    state = optimizer.state[model.embed.weight]
    assert state["history"][3] == 4
    before = whole(state["rows"]), whole(state["history"]["sum"][0])
    train(*parts, range(2, 3))
    return *before, whole(optimizer.state[model.embed.weight]["rows"])


def test_state_of_another_shape_than_its_parameter(tmp_path):
    expected = run_ranks(rows_body, world=2, folder=tmp_path, save=True)[0]
    for result in (
        *run_ranks(rows_body, world=4, folder=tmp_path, save=False),
        rows_body(None, tmp_path, save=False),
    ):
        for value, other in zip(result, expected, strict=True):
            torch.testing.assert_close(value, other)
