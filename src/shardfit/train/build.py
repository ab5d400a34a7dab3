"""build_model_meta: deferred construction, plan, shard and initial weights in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn as nn

from shardfit.errors import ShardfitError
from shardfit.plan import Plan
from shardfit.train.init import deferred
from shardfit.train.launch import Ranks
from shardfit.train.shard import shard
from shardfit.train.units import plan_units


def build_model_meta(
    constructor: Callable[[], nn.Module],
    plan: Plan | None = None,
    *,
    ranks: Ranks | None = None,
    **options: Any,
) -> nn.Module:
    """Build a sharded model without ever holding the whole: construct deferred, plan, shard, fill.

    Args:
        constructor: called with no arguments; returns the model.
        plan: None is `plan_units(model, **options)`.
        ranks: None is those of init_distributed().
        options: for `plan_units`: units, precision, offload, checkpointing, compile, ...

    Raises:
        ShardfitError: options beside a plan, and what `plan_units` and `shard` raise.
    """
    if plan is not None and options:
        raise ShardfitError(
            "a plan was given, and options for making one",
            evidence=f"options: {', '.join(sorted(options))}",
            fix="change the plan (plan.replace), or leave it out",
        )
    with deferred():
        model = constructor()
    return shard(model, plan if plan is not None else plan_units(model, **options), ranks)
