"""The only module that names private parts of torch, each behind a name of our own.

A name that a torch release has moved degrades to "unknown" (None, or False from a
setter), never to a wrong answer. Each has a test in tests/test_torch.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.nn as nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

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
    own = _TORCH_OWN | _fake_own() if isinstance(parameter, FakeTensor) else _TORCH_OWN
    return {name: value for name, value in vars(parameter).items() if name not in own}


@functools.cache
def _fake_own() -> frozenset[str]:
    """What torch keeps on fakes."""
    with FakeTensorMode():
        return frozenset(vars(torch.empty(1)))


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
            units += [_fsdp_unit(path, cast(nn.Module, module), state, group) for group in groups]
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


class _RecordingFakeMode(FakeTensorMode):
    """Fakes whose operators go to `record`, also where no mode of ours is on."""

    def __init__(self, record: Callable[[Any, Any, dict[str, Any]], Any]) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._record = record
        self._inferring = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inferring:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        return self._record(func, args, kwargs or {})


def make_fake_mode(record: Callable[[Any, Any, dict[str, Any]], Any]) -> FakeTensorMode:
    """A mode that makes fakes on which each operator, wherever it runs, is given to `record`."""
    return _RecordingFakeMode(record)


@contextlib.contextmanager
def inferring(mode: FakeTensorMode) -> Iterator[None]:
    """Within it operators run on the mode's fakes, without being recorded."""
    assert isinstance(mode, _RecordingFakeMode)
    mode._inferring += 1
    try:
        with mode:
            yield
    finally:
        mode._inferring -= 1


# What an operator on fakes raises when its result depends on values.
FAKE_NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


def no_modes() -> AbstractContextManager[Any]:
    """Within it no dispatch mode is on."""
    return _disable_current_modes()


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share a storage, as long as one of them lives; fakes have one too."""
    return int(tensor.untyped_storage()._cdata)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor has been written in place."""
    return int(tensor._version)


def written_positions(operator: Any) -> list[int]:
    """Positions of the arguments that an operator writes."""
    return [i for i, argument in enumerate(operator._schema.arguments) if argument.is_write]


def replace_module_apply(
    apply: Callable[[torch.nn.Module, Callable[..., Any], Callable[..., Any], bool], torch.nn.Module],
) -> None:
    """From now on `Module.to`, `half` and the like run `apply(module, function, original, recurse)`."""
    original = torch.nn.Module._apply
    if getattr(original, "replaces", None) is not None:
        return

    def replaced(self: torch.nn.Module, fn: Callable[..., Any], recurse: bool = True) -> torch.nn.Module:
        return apply(self, fn, original, recurse)

    replaced.replaces = original  # type: ignore[attr-defined]
    torch.nn.Module._apply = replaced  # type: ignore[method-assign]


def apply_to_module(module: torch.nn.Module, function: Callable[..., Any]) -> None:
    """What `Module.to` and the like do: `function` on each tensor of the module and those in it."""
    module._apply(function)


def fake_mode_of(value: Any) -> FakeTensorMode | None:
    """The mode that made a fake tensor. None for anything else."""
    return value.fake_mode if isinstance(value, FakeTensor) else None


def local_region(tensor: torch.Tensor) -> tuple[slice, ...]:
    """The region of the whole that this rank's part of a DTensor is; for a plain tensor, all of it."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


class _Dispatching(TorchDispatchMode):
    def __init__(self, record: Callable[[Any, Any, dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._record(func, args, kwargs or {})


def dispatching(record: Callable[[Any, Any, dict[str, Any]], Any]) -> AbstractContextManager[Any]:
    """Within it each operator of this thread is `record(operator, args, kwargs)`."""
    return _Dispatching(record)
