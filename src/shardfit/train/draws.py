"""Draws in the forward: of the global batch on every rank (to compare), or each rank its own (to train)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from shardfit import _torch
from shardfit.train.launch import Ranks


@contextlib.contextmanager
def global_draws(*, total_rows: int, start_row: int, num_rows: int, dim: int | None = None) -> Iterator[None]:
    """Within it, random draws with rows of the batch are made for the whole batch, and this rank's kept.

    So dropout, noise and sampling are those of one process that computes the whole batch, bitwise
    on a CPU, and the generator moves as there. What has no rows of the batch is drawn as it is.
    For comparing runs: it costs the draws of all ranks on each. Put it round the root's forward
    (and its backward, where activations are recomputed), not round the loading of data. On GPUs
    the masks are right in distribution, but not those of one process: Philox counts by kernel.
    Operators that draw as often as their values demand (rrelu, poisson) can't be made the same.

    Rows are found by size: in dim 0 or 1 if it has `num_rows`, or in dim 0 with a multiple of
    them (heads folded into the batch, `[B * H, T, T]`).

    Args:
        total_rows: rows of the global batch.
        start_row: this rank's first row in it.
        num_rows: how many rows this rank computes, see `share_of`.
        dim: 0 or 1: look for rows in this dim only (1: also time and batch folded, `[T * B, ...]`),
            for where another size happens to be `num_rows`. None: see above.
    """
    assert 0 <= start_row < start_row + num_rows <= total_rows, (total_rows, start_row, num_rows)
    with _GlobalDraws(_Rows(total_rows, start_row, num_rows, dim)):
        yield


@dataclass(frozen=True)
class _Place:
    """Where a rank's rows are: `dim` has `folds` entries for each row, next to each other or far apart."""

    dim: int
    folds: int = 1
    is_row_major: bool = True


@dataclass(frozen=True)
class _Rows:
    total: int
    start: int
    num: int
    dim: int | None

    def find(self, sizes: Sequence[int]) -> _Place | None:
        for dim in (0, 1) if self.dim is None else (self.dim,):
            if len(sizes) > dim and sizes[dim] == self.num:
                return _Place(dim)
        if len(sizes) and sizes[0] and sizes[0] % self.num == 0:
            return _Place(0, sizes[0] // self.num, is_row_major=self.dim != 1)
        return None

    def are_in(self, sizes: Sequence[int], place: _Place) -> bool:
        return len(sizes) > place.dim and sizes[place.dim] == self.num * place.folds

    def widen(self, sizes: Sequence[int], place: _Place) -> list[int]:
        whole = list(sizes)
        whole[place.dim] = self.total * place.folds
        return whole

    def keep(self, whole: Tensor, place: _Place) -> Tensor:
        """This rank's rows of a tensor that has all: a view, unfolded to (folds, rows) if far apart."""
        if place.is_row_major:
            return whole.narrow(place.dim, self.start * place.folds, self.num * place.folds)
        sizes = (*whole.shape[: place.dim], place.folds, self.total, *whole.shape[place.dim + 1 :])
        return whole.view(sizes).narrow(place.dim + 1, self.start, self.num)

    def pad(self, local: Tensor, place: _Place) -> Tensor:
        """`local` with all rows, in the same order of memory; the others' are copies of its first."""
        order = sorted(range(local.ndim), key=local.stride, reverse=True)
        sizes = self.widen(local.shape, place)
        whole = local.new_empty([sizes[dim] for dim in order])
        whole = whole.permute([order.index(dim) for dim in range(local.ndim)])
        whole.copy_(local.narrow(place.dim, 0, 1).expand(sizes))
        mine = self.keep(whole, place)
        mine.copy_(local.reshape(mine.shape))
        return whole


class _GlobalDraws(_torch.DispatchMode):
    def __init__(self, rows: _Rows) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = rows

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or self.rows.num == self.rows.total:
            return func(*args, **kwargs)
        return _draw(func, args, kwargs, self.rows)


def _draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rows: _Rows) -> Any:
    """`func` on arguments that have all rows of the batch; its outputs' rows of this rank."""
    values = [*args, *kwargs.values()]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
        return func(*args, **kwargs)
    sizes: list[Sequence[int]] = [tensor.shape for tensor in tensors]
    sizes = sizes or [value for value in values if isinstance(value, list | tuple)]
    place = next((found for size in sizes if (found := rows.find(size))), None)
    if place is None:
        return func(*args, **kwargs)
    padded: list[tuple[Tensor, Tensor]] = []

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor) and rows.are_in(value.shape, place):
            padded.append((value, rows.pad(value, place)))
            return padded[-1][1]
        if not tensors and isinstance(value, list | tuple) and rows.are_in(value, place):
            return rows.widen(value, place)
        return value

    wide_args = [widen(value) for value in args]
    wide_kwargs = {name: widen(value) for name, value in kwargs.items()}
    output = func(*wide_args, **wide_kwargs)
    wide = {**dict(zip(_torch.argument_names(func), wide_args, strict=False)), **wide_kwargs}
    written = [wide[name] for name in _torch.written_arguments(func) if name in wide]
    for local, whole in padded:
        if any(whole is target for target in written):
            local.copy_(rows.keep(whole, place).reshape(local.shape))

    def narrow(item: Any) -> Any:
        for local, whole in padded:
            if item is whole:
                return local
        if not isinstance(item, Tensor) or item.ndim <= place.dim:
            return item
        if item.shape[place.dim] != rows.total * place.folds:
            return item
        mine = rows.keep(item, place)
        return (mine.clone() if place.is_row_major else mine.flatten(place.dim, place.dim + 1)).contiguous()

    return tuple(narrow(item) for item in output) if isinstance(output, tuple) else narrow(output)


class RankDraws:
    """What `rank_draws` has put on a model; `remove()` takes it off."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._place = ranks.data_rank
        self._depth = 0
        self._before: list[Tensor] = []
        self._own: list[Tensor] = []
        self._handles = [
            model.register_forward_pre_hook(self._enter, prepend=True),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @_torch.no_dynamo
    def _enter(self, *_: Any) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._before = _states()
        seed = torch.randint(2**62, ()).item()
        # Odd multiples keep the ranks' seeds apart; each depends on the state of all.
        torch.manual_seed((int(seed) + self._place * 0x9E3779B97F4A7C15) % 2**63)
        self._own = _states()

    @_torch.no_dynamo
    def _leave(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        has_drawn = any(not torch.equal(a, b) for a, b in zip(_states(), self._own, strict=True))
        _set_states(self._before)
        if has_drawn:
            # The next forward must not draw the same again.
            torch.randint(2**62, ())


def rank_draws(model: nn.Module, ranks: Ranks) -> RankDraws:
    """From now on each data rank draws its own dropout and noise inside `model`'s forward.

    Seeded alike, as the build needs it, ranks would drop the same entries of different samples.
    Outside the forward all ranks go on drawing alike, so data, sampling and initialisation stay
    the same everywhere; ranks of one "tensor" group draw alike inside as well. The ranks' streams
    come from the state outside, so a checkpoint needs that state alone, and a resume at another
    world size is well defined. A forward that draws nothing leaves the state as it was.

    Returns:
        a handle; `remove()` ends it.
    """
    return RankDraws(model, ranks)


def _states() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    return states


def _set_states(states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])
