"""Activation checkpointing and compilation of blocks, without renaming anything."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn as nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shardfit import _torch


def checkpoint_blocks(blocks: Sequence[nn.Module], how: Literal["full", "selective"]) -> None:
    """Recompute each block's forward in backward.

    The block's own `forward` is replaced, not the block: paths, classes and parameter names
    stay, and FSDP's hooks stay outside, so that the block is gathered once for the
    recomputation and the gradient.

    "selective" keeps the outputs of matrix products, convolutions and attention.
    """
    for block in blocks:
        block.forward = _checkpointed(block.forward, how)


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compile each block's forward in place; FSDP's hooks stay outside the compiled graph."""
    for block in blocks:
        block.forward = torch.compile(block.forward)


def _checkpointed(forward: Callable[..., Any], how: Literal["full", "selective"]) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_costly)

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Bound here, so that no keyword of the block can be taken for one of checkpoint's.
        return checkpoint(functools.partial(forward, **kwargs), *args, **options)

    return recomputed


def _keep_costly(_: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    if operator in _torch.costly_operators():
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
