"""Checkpointer: saved under one plan, resumed under others."""

from __future__ import annotations

import pytest
import torch

from ranks import run_ranks
from shardfit import Checkpointer, Precision, plan_units, shard
from test_checkpoint import Net, assert_same, snapshot, train

PLANS = [
    {},
    {"checkpointing": "full"},
    {"units": ["blocks.*.up"], "prefetch": 1},
    {"precision": Precision(param="bfloat16")},
    {"offload": True},
]


def plans_body(ranks, folder, plans, save):
    """Train and save under a plan, or resume under each of some."""
    results = []
    for options in plans:
        torch.manual_seed(0 if save else 3)
        model = Net()
        model = shard(model, plan_units(model, **options), ranks)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        parts = model, optimizer, scheduler
        checkpointer = Checkpointer(folder, model=model, optimizer=optimizer, scheduler=scheduler)
        if save:
            train(*parts, range(2))
            checkpointer.save(2)
        else:
            assert checkpointer.resume() == 2
        taken = snapshot(*parts)
        for part in ("model", "state", "hyper", "base_lr"):
            taken[part] = {n.replace("_checkpoint_wrapped_module.", ""): v for n, v in taken[part].items()}
        results.append(taken)
    return results


@pytest.mark.parametrize("number", [1, 4])
def test_resume_under_another_plan(number, tmp_path):
    plans = [PLANS[number]]
    ((expected,), _) = run_ranks(plans_body, world=2, folder=tmp_path, plans=plans, save=True)
    results, _ = run_ranks(plans_body, world=2, folder=tmp_path, plans=PLANS, save=False)
    for plan, result in zip(PLANS, results, strict=True):
        assert_same(expected, result, str(plan))
