"""Fill a sharded model whose parameters have no values yet: each rank its own part."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from shardfit import _torch
from shardfit.errors import ShardfitError
from shardfit.train.heap import returning_memory
from shardfit.train.init import Recording


@torch.no_grad()
def materialize(model: nn.Module, recording: Recording | None, *, device: torch.device) -> None:
    """Allocate every meta parameter and buffer on `device` and fill it from the recording.

    A parameter is replayed whole, this rank's part of it is kept, and the rest dropped: at the
    peak a rank holds its shards and one whole parameter. The parameter objects stay the same, so
    ties do too. What has values keeps them and is moved.

    Args:
        model: sharded (DTensors, on any mesh) or not.
        recording: of `take_recording`.
        device: of the shards; the CPU where they are offloaded.

    Raises:
        ShardfitError: a meta tensor that the recording doesn't have (SF201); nothing is written.
    """
    known = recording.paths if recording is not None else frozenset()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if unknown := [path for path, tensor in tensors if tensor.is_meta and path not in known]:
        raise ShardfitError(
            "parameters have neither values nor a way to make them",
            evidence=", ".join(unknown[:8]) + (f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""),
            fix="build the model inside `with deferred():`, or load weights into it",
            code="SF201",
        )
    with returning_memory():
        for path, parameter in model.named_parameters():
            if parameter.is_meta:
                assert recording is not None
                _allocate(parameter, device)
                part = recording.value(path)[_torch.local_region(parameter)]
                _torch.local_of(parameter).copy_(part)
            elif parameter.device != device:
                parameter.data = parameter.data.to(device)
        moved: dict[int, tuple[Tensor, Tensor]] = {}
        for prefix, module in model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if id(buffer) not in moved:
                    value = buffer
                    if buffer.is_meta:
                        assert recording is not None
                        value = recording.value(f"{prefix}.{name}".lstrip("."))
                    moved[id(buffer)] = (buffer, value.to(device))
                setattr(module, name, moved[id(buffer)][1])


def _allocate(parameter: nn.Parameter, device: torch.device) -> None:
    """Give a meta parameter memory; it stays the same object, with its attributes."""
    made = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
    for name, value in _torch.attributes_of(parameter).items():
        setattr(made, name, value)
    torch.utils.swap_tensors(parameter, made)
