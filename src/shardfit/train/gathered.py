"""Units that stay gathered after forward: how they never go stale.

FSDP2 leaves the root, and each unit with reshard=False or a number, gathered until backward.
Where no backward comes, later forwards compute with old values, and `model.parameters()`
yields temporary tensors: an optimizer built from them, or `zero_grad` on them, has no effect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from shardfit import _torch


class Gathered:
    """The units of a model that stay gathered, and whether its forward is running.

    Args:
        units: one module of each such unit.
    """

    def __init__(self, units: Sequence[FSDPModule]) -> None:
        self.units = list(units)
        self.depth = 0

    def reshard(self) -> None:
        """Back to shards, unless a forward or backward is running and needs the whole."""
        if self.depth == 0 and _torch.in_backward() is False:
            for unit in self.units:
                unit.reshard()


def keep_fresh(model: nn.Module, units: Sequence[FSDPModule], methods: Sequence[str]) -> None:
    """See to it that no forward computes with stale values and nobody sees temporary tensors.

    `units` are resharded before each forward of the root, after each one without gradients,
    and when parameters are listed through the root (parameters, named_parameters, zero_grad).
    A training step pays nothing for it; what is listed between forward and backward is
    gathered once more. `methods` of the root count as forward.
    """
    gathered = Gathered(units)

    @_torch.no_dynamo
    def before(*_: Any) -> None:
        gathered.reshard()
        gathered.depth += 1

    @_torch.no_dynamo
    def after(*_: Any) -> None:
        gathered.depth -= 1
        if not torch.is_grad_enabled():
            gathered.reshard()

    @_torch.no_dynamo
    def after_alone(*_: Any) -> None:
        if not torch.is_grad_enabled():
            gathered.reshard()

    model.register_forward_pre_hook(before, prepend=True)
    model.register_forward_hook(after, always_call=True)
    for unit in gathered.units:
        module = cast(nn.Module, unit)
        if module is not model:
            module.register_forward_hook(after_alone)
    for name in methods:
        register_fsdp_forward_method(model, name)
        setattr(model, name, _between(getattr(model, name), before, after))
    listed = model.named_parameters

    @functools.wraps(listed)
    def named_parameters(*args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        gathered.reshard()
        return listed(*args, **options)

    model.named_parameters = named_parameters  # type: ignore[method-assign]


def _between(
    method: Callable[..., Any], before: Callable[..., None], after: Callable[..., None]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        before()
        try:
            return method(*args, **options)
        finally:
            after()

    return call
