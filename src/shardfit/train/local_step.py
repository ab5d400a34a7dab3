"""An optimizer step on the local parts of sharded parameters.

A DTensor pays for every operator: on a CPU a fused AdamW step over DTensors takes 1.3 to 2.5
times that over the tensors inside them, and the numbers are the same where the rule works
element by element.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardfit import _torch

# Each element of a parameter is updated from that element of its gradient and state alone.
ELEMENTWISE = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)


def step_on_local_parts(optimizer: Optimizer) -> None:
    """Let `optimizer.step` work on local tensors; to everybody else it holds DTensors as before.

    Groups, gradients and state are exchanged inside `step` only, after the step hooks that run
    before it and before those that run after it, and put back also if it raises. Only for the
    classes in ELEMENTWISE themselves: a subclass may do anything.
    """
    assert type(optimizer) in ELEMENTWISE
    inner = getattr(type(optimizer).step, "__wrapped__", None)
    if inner is None:  # torch has changed how hooks go round a step; DTensors work too.
        return

    @functools.wraps(inner)
    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        with torch.no_grad(), local_parts(self):
            inner(self)
        return value

    optimizer.step = MethodType(Optimizer.profile_hook_step(step), optimizer)  # type: ignore[method-assign]


@contextlib.contextmanager
def local_parts(optimizer: Optimizer) -> Iterator[None]:
    """Within it the optimizer holds local tensors: parameters that have a gradient, and their state."""
    groups = optimizer.param_groups
    listed = [group["params"] for group in groups]
    state = optimizer.state
    local_state: defaultdict[Tensor, Any] = defaultdict(dict)
    pairs: list[tuple[Tensor, Tensor]] = []
    try:
        for group, params in zip(groups, listed, strict=True):
            # torch passes over parameters without gradient.
            members = [(param, _part_of(param)) for param in params if param.grad is not None]
            pairs += members
            group["params"] = [part for _, part in members]
        for param, part in pairs:
            if param in state:
                local_state[part] = {key: _local(item) for key, item in state[param].items()}
        optimizer.state = local_state
        yield
    finally:
        for group, params in zip(groups, listed, strict=True):
            group["params"] = params
        optimizer.state = state
        for param, part in pairs:
            for key, item in local_state.get(part, {}).items():
                if _local(state[param].get(key)) is not item:
                    state[param][key] = _as_sharded(item, param, part)


def _part_of(param: Tensor) -> Tensor:
    """This rank's part of a parameter, with its gradient; a plain parameter itself."""
    if not isinstance(param, DTensor):
        return param
    grad = param.grad
    if isinstance(grad, DTensor) and grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    part = _torch.local_of(param).detach()
    part.grad = _local(grad)
    return part


def _local(item: Any) -> Any:
    return _torch.local_of(item) if isinstance(item, DTensor) else item


def _as_sharded(item: Any, param: Tensor, part: Tensor) -> Any:
    """A new state: as the parameter is sharded if it has an element for each of the parameter's."""
    if not (isinstance(item, Tensor) and isinstance(param, DTensor) and item.shape == part.shape):
        return item
    return DTensor.from_local(
        item, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
