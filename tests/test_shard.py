"""shard: the same losses, gradients and weights as one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from model_zoo import LIBRARY, PLAIN, build, run
from ranks import run_ranks
from shardfit import plan_of, plan_units, shard


def train_both(ranks, kind, steps=2, **options):
    """Largest difference to one process, relative to the largest value, of losses and weights."""
    model, inputs = build(kind)
    alone = copy.deepcopy(model)
    shard(model, plan_units(model, **options), ranks)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    rows = 4 // ranks.data_world
    start = ranks.data_rank * rows
    worst = 0.0
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, alone))
    for _ in range(steps):
        loss = run(model, inputs, start, start + rows)
        loss.backward()
        whole = run(alone, inputs)
        whole.backward()
        local = run(alone, inputs, start, start + rows).detach()
        worst = max(worst, ((loss - local).abs() / local).item())
        expected = dict(alone.named_parameters())
        for path, p in model.named_parameters():
            grad = expected[path].grad
            if grad is None:
                assert p.grad is None or not p.grad.full_tensor().any()
                continue
            scale = grad.abs().max().clamp(min=1e-6)
            worst = max(worst, ((p.grad.full_tensor() - grad).abs().max() / scale).item())
        ours.step()
        theirs.step()
        model.zero_grad()
        alone.zero_grad()
    return worst, len(plan_of(model).units)


REDUCES_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")


@pytest.mark.parametrize("kind", PLAIN)
def test_trains_as_one_process(kind):
    if kind == "mixture" and not REDUCES_UNUSED:
        pytest.skip("ranks use different experts: needs torch 2.13")
    results = run_ranks(train_both, kind=kind)
    assert all(worst < 2e-5 for worst, _ in results), results


@pytest.mark.parametrize("kind", LIBRARY)
def test_library_models_train_as_one_process(kind):
    results = run_ranks(train_both, kind=kind)
    assert all(worst < 1e-4 for worst, _ in results), results
    assert results[0][1] > 1
