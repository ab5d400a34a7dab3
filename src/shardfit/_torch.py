"""The only module that names private parts of torch, each behind a name of our own.

A name that a torch release has moved degrades to "unknown" (None, or False from a
setter), never to a wrong answer. Each has a test in tests/test_torch.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

P = ParamSpec("P")
R = TypeVar("R")

DispatchMode = TorchDispatchMode  # a mode that sees each operator; torch has no public name for it


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


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, itself and not a view; any other tensor as it is."""
    local = getattr(tensor, "_local_tensor", None)
    if local is None:
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local  # type: ignore[no-any-return]


def norms_of(tensors: list[torch.Tensor], norm_type: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """The norm of each tensor, no dims, summed in `dtype`; one kernel for many on GPUs."""
    foreach = getattr(torch, "_foreach_norm", None)
    if foreach is None:
        return [torch.linalg.vector_norm(tensor, norm_type, dtype=dtype) for tensor in tensors]
    return list(foreach(tensors, norm_type, dtype=dtype))


def multiply_all(tensors: list[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiply tensors of one device in place; one kernel for many on GPUs."""
    foreach = getattr(torch, "_foreach_mul_", None)
    if foreach is not None:
        foreach(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def skips_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step looks at the `found_inf` that a GradScaler sets, on the device."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def written_arguments(operator: Any) -> list[str]:
    """Names of the arguments that an operator (an OpOverload) writes, in order."""
    return [argument.name for argument in operator._schema.arguments if argument.is_write]


def argument_names(operator: Any) -> list[str]:
    """Names of an operator's arguments, in the order of its positional call."""
    return [argument.name for argument in operator._schema.arguments]


@dataclass(frozen=True)
class FsdpUnit:
    """One communication group of FSDP2, as it stands.

    Attributes:
        path: of the (first) module it was made of.
        params: sharded parameters, as an optimizer holds them.
        reshard: after the forward; an int is the number of ranks of a smaller mesh.
        param_dtype, reduce_dtype: None where the policy leaves them as they are.
        mesh: its data axes.
        is_root: of a forward; None before the first one.
        reduces: whether the next backward reduces its gradients.
    """

    path: str
    module: nn.Module
    params: list[torch.Tensor]
    reshard: bool | int
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    mesh: DeviceMesh
    is_root: bool | None
    reduces: bool


def fsdp_units(model: nn.Module) -> list[FsdpUnit] | None:
    """The units of FSDP2 in `model`, in order of modules. None where torch doesn't tell."""
    units: list[FsdpUnit] = []
    seen: set[int] = set()
    try:
        for path, module in model.named_modules():
            if not isinstance(module, FSDPModule):
                continue
            state: Any = module._get_fsdp_state()
            if id(state) in seen:
                continue
            seen.add(id(state))
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:
                groups = [state._fsdp_param_group] if state._fsdp_param_group else []
            units += [_fsdp_unit(path, module, state, group) for group in groups]
    except (AttributeError, TypeError):
        return None
    return units


def _fsdp_unit(path: str, module: nn.Module, state: Any, group: Any) -> FsdpUnit:
    mesh = group.mesh_info.mesh
    after = group.post_forward_mesh_info
    reshard: bool | int = after is not None
    if after is not None and after.shard_mesh_size != group.mesh_info.shard_mesh_size:
        reshard = int(after.shard_mesh_size)
    return FsdpUnit(
        path=path,
        module=module,
        params=[param.sharded_param for param in group.fsdp_params],
        reshard=reshard,
        param_dtype=group.mp_policy.param_dtype,
        reduce_dtype=group.mp_policy.reduce_dtype,
        mesh=mesh,
        is_root=state._is_root,
        reduces=bool(group.reduce_grads),
    )


def is_in_fsdp_forward(module: nn.Module) -> bool | None:
    """Whether FSDP2's hooks have begun the module's forward and not ended it. None: unknown."""
    try:
        state: Any = module._get_fsdp_state()  # type: ignore[operator]
        return bool(state._training_state.name == "FORWARD")
    except AttributeError:
        return None


def chunk_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Where this rank's part of a DTensor begins in the whole, and its shape. None: not one block."""
    try:
        chunks = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    if len(chunks) != 1:
        return None
    return tuple(chunks[0].offsets), tuple(chunks[0].sizes)
