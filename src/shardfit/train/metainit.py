"""A meta model's own initialisation, recorded: reset_parameters, init_weights and their like."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import torch
import torch.nn as nn
from torch import Tensor

from shardfit import _torch
from shardfit.errors import ShardfitError
from shardfit.train.init import Recording
from shardfit.train.tape import Tape


def record_initialisation(model: nn.Module) -> Recording:
    """Run the initialisation that a meta model brings along, on tensors that own no memory.

    In this order: `reset_parameters()` (and `reset_buffers()`) of each module that holds meta
    tensors itself, in the order in which torch's own constructors run it; then the root's
    `_init_weights(module)` applied to each module; then the `init_weights()` of the outermost
    modules that have it, which is the root's if it has one. What a constructor did beyond
    these is lost with a meta build: `deferred()` keeps it.

    The model is as it was afterwards, also when this raises.

    Raises:
        ShardfitError: tensors that nothing has written, by name. SF201: all of them; SF203: a
            buffer; SF212: a parameter of a module without any initialisation; SF202: others.
    """
    tape = Tape(min_numel=0)
    places = list(_meta_places(model))
    first: dict[int, Tensor] = {}
    with _torch.dispatching(tape.record):
        own = [_shadow(tensor) for _, _, _, tensor in places]
        for shadow, (_, _, _, tensor) in zip(own, places, strict=True):
            first.setdefault(id(tensor), shadow)
        try:
            # A tied tensor is its first holder's. What the others draw is dropped, as in a constructor
            # that ties after it has built both.
            for shadow, (_, module, name, _) in zip(own, places, strict=True):
                setattr(module, name, shadow)
            _reset([module for _, module, _, _ in places])
            for _, module, name, tensor in places:
                setattr(module, name, first[id(tensor)])
            _initialise(model)
            sources = {path: tape.view_of(getattr(module, name)) for path, module, name, _ in places}
        finally:
            for _, module, name, tensor in places:
                setattr(module, name, tensor)
    if unwritten := [path for path, view in sources.items() if not tape.is_written_whole(view)]:
        raise _unwritten_error(model, unwritten, len(sources))
    return Recording({path: (tape, view) for path, view in sources.items()})


def _shadow(tensor: Tensor) -> Tensor:
    """A deferred tensor in a meta tensor's place."""
    shadow = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    if not isinstance(tensor, nn.Parameter):
        return shadow
    return nn.Parameter(shadow, requires_grad=tensor.requires_grad)


def _meta_places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """(path, module, name, tensor) of each meta parameter and buffer, ties at each of their places."""
    for prefix, module in model.named_modules():
        for name, tensor in (
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ):
            if tensor.is_meta:
                yield f"{prefix}.{name}".lstrip("."), module, name, tensor


@torch.no_grad()
def _reset(holders: list[nn.Module]) -> None:
    for module in dict.fromkeys(holders):
        for name in ("reset_parameters", "reset_buffers"):
            if (method := _method(module, name, 0)) is not None:
                method()


@torch.no_grad()
def _initialise(model: nn.Module) -> None:
    if (each := _method(model, "_init_weights", 1)) is not None:
        model.apply(each)
    done: list[nn.Module] = []
    for module in model.modules():
        if any(module in inner.modules() for inner in done):
            continue
        if (method := _method(module, "init_weights", 0)) is not None:
            method()
            done.append(module)


def _method(module: nn.Module, name: str, num_arguments: int) -> Callable[..., None] | None:
    """A module's method, if it can be called with so many positional arguments."""
    method: Callable[..., None] | None = getattr(module, name, None)
    if not callable(method):
        return None
    try:
        inspect.signature(method).bind(*[None] * num_arguments)
    except (TypeError, ValueError):
        return None
    return method


def _unwritten_error(model: nn.Module, unwritten: list[str], total: int) -> ShardfitError:
    modules = dict(model.named_modules())
    buffers = {path for path, _ in model.named_buffers()}
    holders = [modules[path.rpartition(".")[0]] for path in unwritten]
    if len(unwritten) == total:
        code = "SF201"
    elif any(path in buffers for path in unwritten):
        code = "SF203"
    elif not any(hasattr(holder, "reset_parameters") for holder in holders):
        code = "SF212"
    else:
        code = "SF202"
    shown = ", ".join(unwritten[:12]) + (f" and {len(unwritten) - 12} more" if len(unwritten) > 12 else "")
    return ShardfitError(
        "after initialisation some tensors of the meta model have never been written",
        evidence=f"{len(unwritten)} of {total}: {shown}",
        fix="build it inside `with deferred():` in place of the meta device, or write them in "
        "reset_parameters() or init_weights()",
        code=code,
    )
