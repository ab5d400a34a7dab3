"""The only module that names private parts of torch, each behind a name of our own.

A name that a torch release has moved degrades to "unknown" (None, or False from a
setter), never to a wrong answer. Each has a test in tests/test_torch.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensor

P = ParamSpec("P")
R = TypeVar("R")


def set_group_timeout(group: dist.ProcessGroup, seconds: float) -> bool:
    """Change the time limit of a group's collectives. False where torch can't."""
    # Public since 2.14; before that by its private name.
    setter = getattr(dist, "set_timeout", None) or getattr(c10d, "_set_pg_timeout", None)
    if setter is None:
        return False
    setter(timedelta(seconds=seconds), group)
    return True


def all_groups() -> Iterable[dist.ProcessGroup]:
    """The process groups that this rank belongs to."""
    world = getattr(c10d, "_world", None)
    if world is None:
        return [dist.group.WORLD] if dist.group.WORLD is not None else []
    return list(world.pg_map)


def in_backward() -> bool | None:
    """Whether autograd is running a backward in this thread. None where torch doesn't tell."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return None if task is None else bool(task() != -1)


def no_dynamo(function: Callable[P, R]) -> Callable[P, R]:
    """Keep torch.compile out of `function`, without importing dynamo for it."""
    disable = getattr(torch, "_disable_dynamo", None)
    return function if disable is None else disable(function)


def tensor_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]] | None:
    """The hooks that `register_hook` has put on a leaf. None where torch doesn't tell."""
    if not hasattr(tensor, "_backward_hooks"):
        return None
    return list((tensor._backward_hooks or {}).values())


def post_accumulate_grad_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]] | None:
    """Those of `register_post_accumulate_grad_hook`. None where torch doesn't tell."""
    if not hasattr(tensor, "_post_accumulate_grad_hooks"):
        return None
    return list((tensor._post_accumulate_grad_hooks or {}).values())


# What torch itself keeps in the __dict__ of tensors and their subclasses.
_TORCH_OWN = {"_is_param", "_local_tensor", "_spec"}


def attributes_of(parameter: torch.Tensor) -> dict[str, Any]:
    """Attributes that a model has set on a parameter."""
    return {name: value for name, value in vars(parameter).items() if name not in _TORCH_OWN}


def has_values(tensor: torch.Tensor) -> bool:
    """False for tensors of shapes only: meta, and fakes."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


@functools.cache
def costly_operators() -> frozenset[Any]:
    """Operators whose outputs selective checkpointing keeps: products, convolutions, attention."""
    names = (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_scaled_mm",
        "_grouped_mm",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    found = [getattr(torch.ops.aten, name, None) for name in names]
    return frozenset(operator.default for operator in found if operator is not None)
