"""What hangs on parameters and has to survive their replacement: attributes, hooks, ties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn as nn

from shardfit import _torch


@dataclass(frozen=True)
class Carried:
    """Of one parameter: its paths (several where tied), attributes, and hooks."""

    paths: tuple[str, ...]
    attributes: dict[str, Any]
    hooks: tuple[Callable[..., None], ...]


def note_parameters(model: nn.Module) -> list[Carried]:
    """What hangs on each distinct parameter of `model`."""
    parameters: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        parameters.setdefault(id(parameter), (parameter, []))[1].append(path)
    return [
        Carried(
            paths=tuple(paths),
            attributes=_torch.attributes_of(parameter),
            hooks=tuple(_torch.post_accumulate_grad_hooks(parameter) or ()),
        )
        for parameter, paths in parameters.values()
    ]


def put_back(model: nn.Module, carried: list[Carried]) -> None:
    """Hang it on the parameters that have replaced them."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for one in carried:
        now = [parameters[path] for path in one.paths]
        assert all(parameter is now[0] for parameter in now), f"{one.paths} are no longer tied"
        for name, value in one.attributes.items():
            if not hasattr(now[0], name):
                setattr(now[0], name, value)
        for hook in one.hooks:
            now[0].register_post_accumulate_grad_hook(hook)
