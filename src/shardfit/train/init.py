"""Deferred construction: the model's own constructor now, its weights later, shard by shard."""

from __future__ import annotations

import contextlib
import copy
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardfit import _torch
from shardfit.train.heap import returning_memory
from shardfit.train.tape import Tape, View

# Tensors up to this size are made for real: they cost less than their record.
MIN_NUMEL = 2048

_tapes: weakref.WeakKeyDictionary[Any, Tape] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def deferred(*, min_numel: int = MIN_NUMEL) -> Iterator[None]:
    """Within it a model's constructor runs unchanged, but its large tensors own no memory.

        with shardfit.deferred():
            model = GPT(config)
        shardfit.shard(model)

    Each operator that makes or writes such a tensor is recorded with the generator state that it
    saw. `shard` replays them after sharding, one parameter at a time, and keeps this rank's part:
    weights, buffers and the state of torch's generator are bitwise those of the plain build with
    the same seed, at any world size. Whatever Python reads of a value in between (`.item()`,
    numpy, comparison) is computed for real, at its cost. Random operators run twice in all.

    Tensors on other devices than the CPU are made plainly. A tensor that is made inside and is
    no part of the model stays deferred: make data sets outside.

    Args:
        min_numel: tensors up to this number of elements are made plainly.
    """
    tape = Tape(min_numel=min_numel)
    _tapes[tape.fakes] = tape
    _torch.replace_module_apply(_apply)
    try:
        with returning_memory(), _BelowDispatch(), _torch.dispatching(tape.record):
            yield
    finally:
        tape.forget_reads()


class _BelowDispatch(TorchFunctionMode):
    """What is done with a deferred tensor and never reaches the dispatcher: reads into Python, copies."""

    _READS = frozenset({Tensor.numpy, Tensor.tolist, Tensor.__array__})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and (tape := _tape_of(args[0])) is not None:
            if func in self._READS:
                return func(tape.value(tape.view_of(args[0])), *args[1:], **(kwargs or {}))
            if func is Tensor.__deepcopy__:
                return _deepcopy(args[0], args[1])
        return func(*args, **(kwargs or {}))


def _deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    if id(tensor) not in memo:
        copied = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            copied = nn.Parameter(copied, requires_grad=tensor.requires_grad)
        for name, value in _torch.attributes_of(tensor).items():
            setattr(copied, name, copy.deepcopy(value, memo))
        memo[id(tensor)] = copied
    return memo[id(tensor)]  # type: ignore[no-any-return]


def _tape_of(tensor: Any) -> Tape | None:
    mode = _torch.fake_mode_of(tensor)
    return None if mode is None else _tapes.get(mode)


def _apply(
    module: nn.Module, function: Callable[[Tensor], Tensor], original: Callable[..., nn.Module], recurse: bool
) -> nn.Module:
    """`Module._apply` for deferred parameters, which torch's own can't replace: written through `.data`."""
    if not any(_tape_of(parameter) is not None for parameter in module.parameters(recurse=False)):
        return original(module, function, recurse)
    if recurse:
        for child in module.children():
            _torch.apply_to_module(child, function)
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            if _tape_of(parameter) is not None:
                parameter.data = function(parameter)
            else:
                made = nn.Parameter(function(parameter), requires_grad=parameter.requires_grad)
                torch.utils.swap_tensors(parameter, made)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, function(buffer))
    return module


def is_deferred(model: nn.Module) -> bool:
    """Whether any parameter or buffer of the model is deferred."""
    return any(_tape_of(tensor) is not None for tensor in (*model.parameters(), *model.buffers()))


def recipe_digest(model: nn.Module) -> str:
    """Equal where deferred models are made by the same operators from the same random states."""
    tapes = {id(tape): tape for tensor in model.parameters() if (tape := _tape_of(tensor)) is not None}
    return " ".join(tape.digest() for tape in tapes.values())


class Recording:
    """How to make a model's parameters, after their deferred ones have become meta tensors."""

    def __init__(self, sources: dict[str, tuple[Tape, View]]) -> None:
        self._sources = sources

    @property
    def paths(self) -> frozenset[str]:
        """Paths of the parameters and buffers that it can make."""
        return frozenset(self._sources)

    def value(self, path: str, *, unwritten: Callable[[Tensor], None] | None = None) -> Tensor:
        """The whole parameter or buffer at a path, a plain tensor on the CPU. Drop it soon."""
        tape, view = self._sources[path]
        return tape.value(view, unwritten=unwritten)


def take_recording(model: nn.Module) -> Recording | None:
    """Replace a model's deferred parameters by meta ones, in place; returns how to make them.

    Parameters keep their ties and the attributes that were set on them. Deferred buffers and
    plain tensor attributes are made now, whole: they are not sharded. None where nothing is
    deferred.
    """
    if not is_deferred(model):
        return None
    _warn_of_unwritten(model)
    sources: dict[str, tuple[Tape, View]] = {}
    replaced: dict[int, tuple[Tensor, nn.Parameter]] = {}
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            tape = _tape_of(parameter)
            if tape is not None:
                sources[f"{prefix}.{name}".lstrip(".")] = (tape, tape.view_of(parameter))
                if id(parameter) not in replaced:
                    replaced[id(parameter)] = (parameter, _meta_like(parameter))
            if id(parameter) in replaced:
                setattr(module, name, replaced[id(parameter)][1])
        for name, value in [*module.named_buffers(recurse=False), *vars(module).items()]:
            if (tape := _tape_of(value)) is not None and not isinstance(value, nn.Parameter):
                if id(value) not in made:  # one that several modules hold stays one
                    made[id(value)] = (value, tape.value(tape.view_of(value)))
                setattr(module, name, made[id(value)][1])
    for tape, _ in sources.values():
        tape.forget_reads()
    return Recording(sources)


def _warn_of_unwritten(model: nn.Module) -> None:
    unwritten = [
        path
        for path, parameter in model.named_parameters()
        if (tape := _tape_of(parameter)) is not None and not tape.is_written(tape.view_of(parameter))
    ]
    if unwritten:
        warnings.warn(
            "the constructor leaves parameters as torch.empty made them, with whatever was in memory: "
            + ", ".join(unwritten[:8])
            + ". Initialise them, or load weights.",
            stacklevel=4,
        )


def _meta_like(parameter: nn.Parameter) -> nn.Parameter:
    with _torch.no_modes():
        empty = torch.empty_strided(
            parameter.size(), parameter.stride(), dtype=parameter.dtype, device="meta"
        )
        made = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for name, value in _torch.attributes_of(parameter).items():
        setattr(made, name, value)
    return made
