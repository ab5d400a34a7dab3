"""train_step: one optimizer step over micro-batches; and its pieces for scripts with a loop of their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardfit import _torch
from shardfit.errors import ShardfitError
from shardfit.train.clip import reduce_norm, scale_to_norm
from shardfit.train.data import BatchSlice, data_groups
from shardfit.train.launch import Ranks, current_ranks

IGNORED = -100  # targets of this value don't count: torch's default ignore_index


@dataclass(frozen=True)
class StepResult:
    """What a step did, as values of the global batch: the same on all ranks.

    The tensors have no dims and are on the device; nothing waits for it until one is read
    (`float(result.loss)`, an f-string), and reading needs no collective.

    Attributes:
        loss: float32, the mean over all items of all ranks and micro-batches.
        tokens: int64, the number of these items.
        grad_norm: float32, the norm of the whole gradient, before clipping and without the
            scaler's factor.
    """

    loss: Tensor
    tokens: Tensor
    grad_norm: Tensor

    @property
    def applied(self) -> bool:
        """False where the gradient wasn't finite: then all ranks have left their weights alone."""
        return bool(torch.isfinite(self.grad_norm))

    @property
    def reason(self) -> str:
        """Why the step was not applied; empty if it was."""
        return "" if self.applied else f"the gradient's norm is {float(self.grad_norm)}"


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    micro_batches: Any,
    *,
    loss: Callable[[Any, Any], Tensor],
    count: Callable[[Any, Any], int | Tensor] | None = None,
    max_norm: float | None = None,
    scheduler: LRScheduler | None = None,
    scaler: torch.amp.GradScaler | None = None,
    ranks: Ranks | None = None,
) -> StepResult:
    """Forward, backward, clip and step, on this rank's part of a global batch.

    The gradient is that of the mean over all items of the global batch, however they are spread
    over ranks and micro-batches. Gradients are reduced in the last micro-batch's backward only.
    A step makes two small collectives besides FSDP2's own (counts; norm and loss), and waits for
    the device only where torch can't skip a step without it (see below).

    A gradient that isn't finite leaves weights and optimizer state alone, on all ranks alike.
    Optimizers with a fused kernel skip on the device; others on a GPU read the norm first. The
    scheduler moves on all the same, so that it counts calls, as in a plain loop.

    Args:
        model: sharded. Called as `model(inputs)`; `model(*inputs)` where inputs is a tuple,
            `model(**inputs)` where it is a mapping.
        optimizer: holds all of its trainable parameters. Its gradients are cleared at the end.
        micro_batches: a list of (inputs, targets), of this rank, on its device; or one such tuple.
            A `BatchSlice` of one is as good: with weight 0.0 it is run and doesn't count. All ranks
            need as many.
        loss: of outputs and targets, a mean over the items that `count` counts.
        count: how many items a micro-batch's loss is the mean over. None: for integer targets
            those that aren't -100, for floating ones all elements.
        max_norm: clip the whole gradient's norm to it. None doesn't clip.
        scheduler: advanced once, after the optimizer.
        scaler: `torch.amp.GradScaler` for float16: scales the loss, unscales before clipping.
        ranks: None is those of init_distributed().

    Raises:
        ShardfitError: no micro-batch, one that can't be counted, a loss that is no scalar, a
            model that isn't sharded, an optimizer none of whose parameters got a gradient (SF501).
    """
    ranks = ranks or current_ranks()
    batches = _listed(micro_batches)
    groups = data_groups(ranks)
    counts = torch.stack([_count(micro, count, ranks.device) for micro in batches])
    tokens = counts.sum()
    waiting = [dist.all_reduce(tokens, group=group, async_op=True) for group in groups[:1]]
    sum_of_losses = torch.zeros(1, dtype=torch.float64, device=ranks.device)
    last = len(batches) - 1
    try:
        for index, micro in enumerate(batches):
            if last > 0 and index in (0, last):
                sync_gradients(model, index == last)
            value = _loss(model, micro, loss)
            if index == 0:
                for work in waiting:
                    work.wait()
                for group in groups[1:]:
                    dist.all_reduce(tokens, group=group)
            # FSDP2 averages over the data ranks, so a sum over them needs their number.
            share = counts[index] * ranks.data_world / tokens.clamp(min=1)
            # A mean over no items is nan, and nan * 0 would be too.
            value = torch.where(counts[index] > 0, value * share.to(value.dtype), 0.0)
            sum_of_losses += value.detach()
            scaled = scaler.scale(value) if scaler is not None else value
            torch.autograd.backward(scaled)
    finally:
        if last > 0:
            sync_gradients(model, True)

    if scaler is not None:
        scaler.unscale_(optimizer)
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not grads:
        raise ShardfitError(
            "no parameter of the optimizer has got a gradient",
            evidence=f"{sum(len(group['params']) for group in optimizer.param_groups)} parameters",
            fix="build the optimizer from this model, after shard(model)",
            code="SF501",
        )
    norm, summed = reduce_norm(grads, along=sum_of_losses, along_groups=groups)
    assert summed is not None
    if max_norm is not None:
        scale_to_norm(grads, norm, max_norm)
    skipped = _step(optimizer, norm, scaler)
    if scheduler is not None:
        _advance(scheduler, skipped)
    optimizer.zero_grad()
    mean = (summed / ranks.data_world).squeeze(0).float()
    return StepResult(loss=mean, tokens=tokens, grad_norm=norm)


def sync_gradients(model: nn.Module, last: bool) -> None:
    """Whether the next backward reduces gradients over the ranks: True in the last micro-batch only.

    Call it before the forward of each micro-batch: `sync_gradients(model, micro == num_micro - 1)`.
    Without it every micro-batch is reduced: right, and slower. Gradients that wait are whole, not
    sharded, on each rank.

    Raises:
        ShardfitError: the model isn't sharded.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        return
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        raise ShardfitError(
            "the model isn't sharded, so it has no gradients to reduce",
            evidence=type(model).__name__,
            fix="call shard(model) before training",
        )
    for unit in units:
        unit.set_requires_gradient_sync(last, recurse=False)


@dataclass(frozen=True)
class _MicroBatch:
    inputs: Any
    targets: Any
    is_dummy: bool


def _listed(micro_batches: Any) -> list[_MicroBatch]:
    one = isinstance(micro_batches, tuple)
    found = []
    for item in [micro_batches] if one else list(micro_batches):
        pair, weight = item if isinstance(item, BatchSlice) else (item, 1.0)
        if not (isinstance(pair, Sequence) and len(pair) == 2):
            raise ShardfitError(
                "a micro-batch is a pair of inputs and targets",
                evidence=f"got {type(pair).__name__}"
                + (f" of {len(pair)}" if hasattr(pair, "__len__") else ""),
                fix="train_step(model, optimizer, [(inputs, targets), ...], ...)",
            )
        found.append(_MicroBatch(pair[0], pair[1], weight == 0.0))
    if not found:
        raise ShardfitError("there is no micro-batch", evidence="an empty list", fix="give at least one")
    return found


def _count(
    micro: _MicroBatch, count: Callable[[Any, Any], int | Tensor] | None, device: torch.device
) -> Tensor:
    """Items of a micro-batch: int64, no dims, on the device."""
    if micro.is_dummy:
        return torch.zeros((), dtype=torch.int64, device=device)
    if count is not None:
        counted = count(micro.inputs, micro.targets)
    elif isinstance(micro.targets, Tensor):
        whole = micro.targets.is_floating_point()
        counted = micro.targets.numel() if whole else (micro.targets != IGNORED).sum()
    else:
        raise ShardfitError(
            "can't tell how many items the loss of a micro-batch is the mean over",
            evidence=f"targets is {type(micro.targets).__name__}",
            fix='give count, as count=lambda inputs, targets: (inputs["labels"][:, 1:] != -100).sum()',
            code="SF509",
        )
    return torch.as_tensor(counted, dtype=torch.int64, device=device)


def _loss(model: nn.Module, micro: _MicroBatch, loss: Callable[[Any, Any], Tensor]) -> Tensor:
    """The local mean loss, at least float32, no dims."""
    inputs = micro.inputs
    if isinstance(inputs, Mapping):
        outputs = model(**inputs)
    elif isinstance(inputs, tuple):
        outputs = model(*inputs)
    else:
        outputs = model(inputs)
    value = loss(outputs, micro.targets)
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ShardfitError(
            "loss must give one number",
            evidence=f"got {tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__}",
            fix="reduce it to the mean over the micro-batch's items",
        )
    value = value.squeeze()
    return value if value.dtype == torch.float64 else value.float()


def _step(optimizer: Optimizer, norm: Tensor, scaler: torch.amp.GradScaler | None) -> bool:
    """Step unless `norm` isn't finite. True where it is known here that the step was skipped."""
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
        return norm.device.type == "cpu" and not bool(torch.isfinite(norm))
    if norm.device.type != "cpu" and _torch.skips_by_itself(optimizer):
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        return False
    if not bool(torch.isfinite(norm)):
        return True
    optimizer.step()
    return False


def _advance(scheduler: LRScheduler, skipped: bool) -> None:
    if not skipped:
        scheduler.step()
        return
    with warnings.catch_warnings():
        # It would say that the two calls are in the wrong order, if the first step was skipped.
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        scheduler.step()
