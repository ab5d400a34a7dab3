"""Each private name of torch that `_torch.py` uses does what we take it to do."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from ranks import run_ranks

from shardfit import _torch


def time_out(ranks):
    groups = list(_torch.all_groups())
    assert dist.group.WORLD in groups
    assert all(_torch.set_group_timeout(group, 1.5) for group in groups)
    try:
        if ranks.rank == 0:
            dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return str(error)
    finally:
        dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
        store.set(f"done{ranks.rank}", "")
        store.wait(["done0", "done1"], timedelta(seconds=30))
    return ""


def test_set_group_timeout_bounds_a_collective():
    assert "1500ms" in run_ranks(time_out)[0]
