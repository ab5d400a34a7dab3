"""Calls around a training step that tell something: loss scaling, clipping, schedules, warnings."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_MAX_CLIPS = 1000


class Calls:
    """What those calls of this process were given, and gave.

    Args:
        num_steps: gives the optimizer steps done so far.
        is_active: False in forked children.

    Attributes:
        scale: the factor that a GradScaler last put on a loss. None: there was none.
    """

    def __init__(self, *, num_steps: Callable[[], int], is_active: Callable[[], bool]) -> None:
        self.scale: float | None = None
        self._num_steps = num_steps
        self._is_active = is_active
        self._clips: list[dict[str, Any]] = []
        self._schedulers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._warnings: list[str] = []

    def install(self) -> None:
        self._watch_scalers()
        self._watch_clips()
        self._watch_schedulers()
        self._watch_warnings()
        _draw_alike_in_models()

    def facts(self, stepped: Collection[Any]) -> dict[str, Any]:
        """`stepped`: the optimizers that have stepped."""
        return {
            "clips": self._clips,
            "warnings": self._warnings,
            "schedulers": [
                {
                    "class": type(scheduler).__name__,
                    "last_epoch": getattr(scheduler, "last_epoch", None),
                    "drives": getattr(scheduler, "optimizer", None) in stepped,
                }
                for scheduler in self._schedulers
            ],
        }

    def _watch_scalers(self) -> None:
        inner = torch.amp.GradScaler.scale

        @functools.wraps(inner)
        def scale(this: Any, *args: Any, **kwargs: Any) -> Any:
            result = inner(this, *args, **kwargs)
            if self._is_active() and this.is_enabled():
                self.scale = float(this.get_scale())
            return result

        torch.amp.GradScaler.scale = scale  # type: ignore[method-assign, assignment]

    def _watch_clips(self) -> None:
        import shardfit.train.clip

        owners: list[tuple[Any, str]] = [
            (torch.nn.utils, "torch"),
            (torch.nn.utils.clip_grad, "torch"),
            (shardfit.train.clip, "shardfit"),
        ]
        for owner, home in owners:
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                if hasattr(owner, name):
                    setattr(owner, name, self._clip(getattr(owner, name), f"{home}.{name}"))

    def _clip(self, inner: Callable[..., Any], call: str) -> Callable[..., Any]:
        @functools.wraps(inner)
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            result = inner(parameters, *args, **kwargs)
            clips = self._clips
            if self._is_active() and len(clips) < _MAX_CLIPS:
                limit = args[0] if args else kwargs.get("max_norm", kwargs.get("clip_value"))
                plain = isinstance(result, Tensor) and not isinstance(result, DTensor)
                norm = float(result) if plain else None
                clips.append(
                    {"call": call, "step": self._num_steps(), "max_norm": float(limit or 0.0), "norm": norm}
                )
            return result

        return clip

    def _watch_schedulers(self) -> None:
        base = torch.optim.lr_scheduler.LRScheduler
        inner = base.__init__

        @functools.wraps(inner)
        def init(this: Any, *args: Any, **kwargs: Any) -> None:
            inner(this, *args, **kwargs)
            self._schedulers.add(this)

        base.__init__ = init  # type: ignore[method-assign, assignment]

    def _watch_warnings(self) -> None:
        inner = warnings.showwarning

        @functools.wraps(inner)
        def show(message: Any, category: type[Warning], *args: Any, **kwargs: Any) -> None:
            text = f"{category.__name__}: {message}"[:400]
            if len(self._warnings) < 20 and text not in self._warnings:
                self._warnings.append(text)
            inner(message, category, *args, **kwargs)

        warnings.showwarning = show


def _draw_alike_in_models() -> None:
    """Ranks that would draw their own dropout (for speed) draw the whole batch's here."""
    from shardfit.train import draws, random

    class Inert:
        def remove(self) -> None:
            pass

    owners: list[Any] = [draws, random]
    for owner in owners:
        owner.rank_draws = lambda model, ranks: Inert()
