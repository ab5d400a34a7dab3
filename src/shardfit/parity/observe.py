"""Observation of a training script from inside its process: losses, gradients, steps."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardfit import _torch
from shardfit.parity.observe_calls import Calls
from shardfit.parity.observe_cuts import Cuts, Limits
from shardfit.parity.observe_files import Files
from shardfit.parity.observe_inputs import (
    Draws,
    Exchange,
    digest_inputs,
    digest_rows,
    generator_digest,
    tensors_in,
)
from shardfit.parity.observe_modules import Models, ancestors_of, class_name
from shardfit.parity.recording import Step


@dataclass
class _Seen:
    """What has been seen since the last step of any optimizer."""

    losses: list[float] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    backwards: int = 0
    training: bool = True
    unsynced: list[str] = field(default_factory=list)


@dataclass
class _Open:
    """A step that optimizers have begun and others may join."""

    losses: list[float] = field(default_factory=list)
    squares: dict[str, float] = field(default_factory=dict)
    lr: list[float] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    backwards: int = 0
    training: bool = True
    stepped: list[Optimizer] = field(default_factory=list)


class Observer:
    """Observes one process from `install` to its end.

    Args:
        exchange: with the other ranks' observers.
        limits: where the run is cut.
        on_step: called with each step when it is complete.
        on_stop: called where the run is to be stopped; does not return.
        on_beat: called at forwards, backwards and steps: signs of life.
    """

    def __init__(
        self,
        *,
        exchange: Exchange,
        limits: Limits,
        on_step: Callable[[Step], None],
        on_stop: Callable[[], None],
        on_beat: Callable[[], None],
    ) -> None:
        self.steps: list[Step] = []
        self.models = Models()
        self.first_facts: dict[str, Any] = {}
        self.files = Files(
            num_steps=lambda: self.num_steps, inside=limits.scratch, is_active=lambda: self.is_active
        )
        self._calls = Calls(num_steps=lambda: self.num_steps, is_active=lambda: self.is_active)
        self._exchange = exchange
        self._cuts = Cuts(limits, exchange, self.files)
        self._on_step, self._on_stop, self._on_beat = on_step, on_stop, on_beat
        self._pid = os.getpid()
        self._thread = threading.local()
        self._seen = _Seen()
        self._squares: dict[str, float] = {}  # after the last backward, not yet of a step
        self._open: _Open | None = None
        self._steps_of: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._backward_depth = 0
        self._step_depth = 0
        self._hollow: list[bool] = []
        self._forwards_since_step = 0
        self._draws = Draws()
        self._before_first: dict[str, str] = {}
        self._looked_above: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._last_close = time.monotonic()
        self._lists: dict[str, list[Any]] = {
            name: [] for name in ("backwards", "forwards", "modes", "scales", "rng", "unsynced")
        }
        self._counts: dict[str, Counter[str]] = {"loss_dtypes": Counter(), "grad_dtypes": Counter()}
        self._maps: dict[str, dict[str, Any]] = {"missing_grads": {}, "row_digests": {}}
        self._once: dict[str, Any] = {}
        self._direct: list[str] = []

    @property
    def is_active(self) -> bool:
        """False in children that were forked (the workers of a DataLoader)."""
        return os.getpid() == self._pid

    @property
    def num_steps(self) -> int:
        """Optimizer steps done."""
        return len(self.steps) + (self._open is not None)

    @property
    def _current(self) -> int:
        """Index of the step that is being computed."""
        is_awaited = self._open is not None and any(o not in self._open.stepped for o in self._expected())
        return self.num_steps - is_awaited

    def install(self) -> None:
        self.files.install()
        self._wrap_calls()
        self._wrap_backward()
        self._wrap_optimizers()
        self._calls.install()

    # Forwards

    def _wrap_calls(self) -> None:
        inner = nn.Module.__call__
        thread = self._thread

        @functools.wraps(inner)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if getattr(thread, "depth", 0) or self._backward_depth or not self.is_active:
                return inner(module, *args, **kwargs)
            if next(module.parameters(), None) is None:
                return inner(module, *args, **kwargs)
            thread.depth = 1
            try:
                if not torch.is_grad_enabled():
                    self._on_beat()
                    return inner(module, *args, **kwargs)
                with self._forward(module, args, kwargs):
                    return inner(module, *args, **kwargs)
            finally:
                thread.depth = 0

        nn.Module.__call__ = call  # type: ignore[method-assign]

    @contextlib.contextmanager
    def _forward(self, module: nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
        self._boundary()
        self._on_beat()
        with self._careful():
            self._note_inputs(module, args, kwargs)
        if self._exchange.world > 1:
            with self._careful():
                self._align_draws()
        self._forwards_since_step += 1
        try:
            with self._draws.made():
                yield
        finally:
            self._draws.after_forward()

    def _note_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.models.add_called(module)
        self._look_above(module)
        seen = self._seen
        tensors = list(tensors_in([args, kwargs]))
        inputs, rows = digest_inputs(tensors)
        seen.inputs.append(inputs)
        seen.rows.append(rows or 0)
        seen.training = seen.training and module.training
        step = self._current
        if step < 2:
            digests = self._maps["row_digests"].setdefault(str(step), [])
            digests.append(digest_rows(tensors, rows))
        generator = generator_digest()
        if len(self._lists["rng"]) == step:
            self._lists["rng"].append(generator)

    def _align_draws(self) -> None:
        self.models.refresh()
        mine = {
            "rows": self._seen.rows[-1],
            "digest": self._seen.inputs[-1],
            "rng": generator_digest(),
            "place": self.data_place[0],
        }
        key = f"forward/{self._current}/{self._forwards_since_step}"
        self._draws.align(key, mine, self._exchange.all(key, mine), self._exchange)

    @contextlib.contextmanager
    def _careful(self) -> Iterator[None]:
        """A mistake in looking must not look like the script's: it is noted, and the script goes on."""
        try:
            yield
        except Exception:
            self._once.setdefault("recorder_error", traceback.format_exc())

    @functools.cached_property
    def data_place(self) -> tuple[int, int]:
        """This rank's place among those that get different data, and their number."""
        return self.models.data_place()

    def _look_above(self, module: nn.Module) -> None:
        """A module of FSDP2 around `module` whose hooks have not run: its forward was called directly."""
        if self._exchange.world == 1 or module in self._looked_above or len(self._looked_above) > 20:
            return
        self._looked_above.add(module)
        for above in ancestors_of(module):
            if isinstance(above, FSDPModule) and _torch.is_in_fsdp_forward(above) is False:
                name = class_name(above)
                if name not in self._direct:
                    self._direct.append(name)

    # Backwards

    def _wrap_backward(self) -> None:
        inner = torch.autograd.backward

        @functools.wraps(inner)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            # Within a backward: a checkpointed block that is computed again.
            if self._backward_depth or _torch.in_backward() or not self.is_active:
                return inner(tensors, grad_tensors, *args, **kwargs)
            self._boundary()
            self._on_beat()
            with self._careful():
                self._note_loss(tensors, grad_tensors)
            self._backward_depth += 1
            try:
                with self._draws.made():
                    result = inner(tensors, grad_tensors, *args, **kwargs)
            finally:
                self._backward_depth -= 1
            with self._careful():
                self._after_backward()
            return result

        torch.autograd.backward = backward

    def _note_loss(self, tensors: Any, grads: Any) -> None:
        losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        weights = [grads] if isinstance(grads, Tensor) or grads is None else list(grads)
        weights += [None] * (len(losses) - len(weights))
        total = 0.0
        for loss, weight in zip(losses, weights, strict=True):
            value = _whole(loss.detach()).double()
            if weight is not None:
                value = value * _whole(weight.detach()).double()
            total += float(value.sum())
            self._counts["loss_dtypes"][_dtype_name(loss)] += 1
        self._seen.losses.append(total / (self._calls.scale or 1.0))
        self._seen.backwards += 1

    def _after_backward(self) -> None:
        self.models.refresh()
        self._squares = self._unscaled(self.models.squares())
        self._seen.unsynced = [unit.path for unit in self.models.units() or [] if not unit.reduces]
        for root in self.models.roots:
            if isinstance(root, DistributedDataParallel) and not root.require_backward_grad_sync:
                self._seen.unsynced.append("")
        self._on_beat()

    def _unscaled(self, squares: dict[str, float]) -> dict[str, float]:
        factor = (self._calls.scale or 1.0) ** 2
        return {name: value / factor for name, value in squares.items()}

    # Steps

    def _wrap_optimizers(self) -> None:
        inner = Optimizer.__init__

        @functools.wraps(inner)
        def init(this: Optimizer, *args: Any, **kwargs: Any) -> None:
            inner(this, *args, **kwargs)
            if self.is_active:
                self.models.add_optimizer(this)

        Optimizer.__init__ = init  # type: ignore[method-assign, assignment]
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.is_active:
            return
        closure = any(arg is not None for arg in (*args[1:], kwargs.get("closure")))
        self._hollow.append(not closure and self._is_hollow(optimizer))
        if self._hollow[-1]:
            return
        if self._open is not None and optimizer in self._open.stepped:
            self._close()
        if self._open is None and self._cuts.is_complete(len(self.steps)):
            self._on_stop()
        self._step_depth += 1
        if closure:
            self._once["closure"] = True
        if self._open is None:
            self._open = _Open()
        self._open.stepped.append(optimizer)
        self._open.lr += [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        self.models.refresh()
        own = [t for group in optimizer.param_groups for t in group["params"]]
        # A step from within a backward, or gradients that didn't come from one.
        names = {held.name for held in self.models.held_by(own)}
        if self._backward_depth or not names & set(self._squares):
            self._squares |= self._unscaled(self.models.squares(own))
        if self._steps_of.get(optimizer, 0) < 3:
            with self._careful():
                self._note_first_steps(own)

    def _is_hollow(self, optimizer: Optimizer) -> bool:
        """A step without any gradient and loss, by which torch's checkpoints make an optimizer's state."""
        if self._seen.backwards or self._backward_depth:
            return False
        grads = [t.grad for group in optimizer.param_groups for t in group["params"]]
        return not any(bool(_torch.local_of(grad).any()) for grad in grads if grad is not None)

    def _note_first_steps(self, own: list[Tensor]) -> None:
        held = self.models.held_by(own)
        missing = [h.name for h in held if h.tensor.requires_grad and h.tensor.grad is None]
        step = self.num_steps - 1
        if missing and step < 3:
            self._maps["missing_grads"].setdefault(str(step), []).extend(missing)
        if step == 0:
            self._counts["grad_dtypes"].update(
                _dtype_name(h.tensor.grad) for h in held if h.tensor.grad is not None
            )
            if not self._before_first:
                self._before_first = self.models.digests(whole_only=False)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.is_active or self._hollow.pop():
            return
        self._step_depth -= 1
        step, seen = self._open, self._seen
        assert step is not None
        self._steps_of[optimizer] = self._steps_of.get(optimizer, 0) + 1
        step.losses += seen.losses
        for name in self.models.names_for(optimizer):
            if name in self._squares:
                step.squares[name] = self._squares.pop(name)
        step.inputs += seen.inputs
        step.rows += seen.rows
        step.backwards += seen.backwards
        step.training = step.training and seen.training
        if seen.unsynced and len(self.steps) not in self._lists["unsynced"]:
            self._lists["unsynced"].append(len(self.steps))
            self._once.setdefault("unsynced_units", seen.unsynced)
        self._seen = _Seen()
        self._forwards_since_step = 0
        if not self._backward_depth and all(o in step.stepped for o in self._expected()):
            self._close()

    def _expected(self) -> list[Optimizer]:
        """Optimizers that should take part in the open step: all in the first, then those that ever did."""
        alive = self.models.optimizers
        return alive if not self.steps else [o for o in alive if o in self._steps_of]

    def _close(self) -> None:
        step = self._open
        assert step is not None
        now = time.monotonic()
        closed = Step(
            index=len(self.steps),
            losses=tuple(step.losses),
            squares=step.squares,
            lr=tuple(step.lr),
            inputs=tuple(step.inputs),
            rows=tuple(step.rows),
            weights=self.models.digests(whole_only=True) if self._exchange.world > 1 else {},
            seconds=now - self._last_close,
        )
        if not self.steps:
            with self._careful():
                self._note_unmoved(step)
                self.first_facts = self._module_facts()
        self._lists["backwards"].append(step.backwards)
        self._lists["forwards"].append(len(step.inputs))
        self._lists["modes"].append(step.training)
        if self._calls.scale is not None:
            self._lists["scales"].append(self._calls.scale)
        self._open = None
        self.steps.append(closed)
        self._last_close = now
        self._on_step(closed)

    def _note_unmoved(self, step: _Open) -> None:
        if not any(lr > 0 for lr in step.lr):
            return
        after = self.models.digests(whole_only=False)
        self._once["unmoved"] = [
            name
            for name, square in step.squares.items()
            if square > 0 and name in after and after[name] == self._before_first.get(name)
        ]

    def _boundary(self) -> None:
        """The script begins to compute: what belongs to the step before it is done."""
        if self._step_depth:
            return
        if self._cuts.is_complete(len(self.steps)):
            self._on_stop()
        if self._forwards_since_step == 0 and not self._seen.backwards and self.steps:
            began = time.monotonic()
            if self._cuts.stops_after_saves(len(self.steps)):
                self._on_stop()
            self._last_close += time.monotonic() - began

    # Ends

    def finish(self) -> None:
        """The script has ended: what is open is complete."""
        if self._open is not None:
            self._close()

    def facts(self) -> dict[str, Any]:
        """All facts, as `shardfit.parity.recorder` documents them."""
        end = self._module_facts()
        facts = dict(self.first_facts or end)
        facts["changed"] = {name: value for name, value in end.items() if value != facts.get(name)}
        facts |= {name: list(values) for name, values in self._lists.items() if values or name != "scales"}
        facts |= {name: dict(counts) for name, counts in self._counts.items()}
        facts |= self._maps
        facts |= self._once
        facts |= self.files.facts() | self._cuts.facts
        facts["forward_called_directly"] = self._direct
        facts["draws"] = self._draws.how
        if self._draws.why:
            facts["draws_why"] = self._draws.why
        facts["rng_differs"] = self._draws.differs
        if self._exchange.broken:
            facts["exchange_broken"] = self._exchange.broken
        facts |= self._calls.facts(list(self._steps_of))
        facts["buffers"] = self.models.buffers()
        facts["optimizers"] = [
            {
                "class": type(optimizer).__name__,
                "groups": [len(group["params"]) for group in optimizer.param_groups],
                "steps": self._steps_of.get(optimizer, 0),
            }
            for optimizer in self.models.optimizers
        ]
        return facts

    def _module_facts(self) -> dict[str, Any]:
        self.models.refresh()
        return self.models.facts(self._exchange.world)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
