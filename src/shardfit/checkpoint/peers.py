"""Peers: the ranks that save and load together, and how they agree on what went wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from shardfit.errors import EXIT_COULD_NOT_RUN, ShardfitError
from shardfit.train.launch import Ranks, current_ranks

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Peers:
    """This process's place among those that share a checkpoint.

    Attributes:
        rank, world: global rank and number of ranks; 0 and 1 without a process group.
        data_rank, data_world: see `Ranks`.
        mesh: sizes of the mesh axes by name; empty without a mesh.
    """

    rank: int = 0
    world: int = 1
    data_rank: int = 0
    data_world: int = 1
    mesh: dict[str, int] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        """True where there is no process group: nothing is sent."""
        return not dist.is_initialized()

    @property
    def is_first(self) -> bool:
        """True on rank 0: the one that commits."""
        return self.rank == 0

    def each(self, action: Callable[[], T], what: str) -> list[T]:
        """Run `action` on every rank; the values of all, by rank.

        No rank goes on before all have ended it. If it fails on any rank, all raise alike.

        Args:
            what: the error's first line, where what was raised is no ShardfitError.
        """
        value: T | None = None
        error: Exception | None = None
        try:
            value = action()
        except (Exception, CheckpointException) as raised:  # the latter is a BaseException
            error = _as_error(raised, what)
        outcomes = self._gather((value, error))
        if any(failed for _, failed in outcomes):
            raise _joined([failed for _, failed in outcomes]) from error
        return [done for done, _ in outcomes]

    def each_own(self, action: Callable[[], T], what: str) -> T:
        """`each`, where the value stays on its rank."""
        made: list[T] = []
        self.each(lambda: made.append(action()), what)
        return made[0]

    def first(self, action: Callable[[], T], what: str) -> T:
        """Run `action` on rank 0; its value on every rank. If it fails, all raise alike."""
        return self.each(lambda: action() if self.rank == 0 else None, what)[0]  # type: ignore[return-value]

    def _gather(self, outcome: Any) -> list[Any]:
        if self.alone:
            return [outcome]
        outcomes: list[Any] = [None] * self.world
        dist.all_gather_object(outcomes, outcome)
        return outcomes


def find_peers(ranks: Ranks | None = None) -> Peers:
    """The place of this process: of `ranks`, of `init_distributed`, or of the bare process group."""
    if ranks is None:
        with contextlib.suppress(ShardfitError):
            ranks = current_ranks()
    if ranks is not None and dist.is_initialized():
        names = ranks.mesh.mesh_dim_names or ()
        return Peers(
            rank=ranks.rank,
            world=ranks.world,
            data_rank=ranks.data_rank,
            data_world=ranks.data_world,
            mesh={name: ranks.mesh.size(dim) for dim, name in enumerate(names)},
        )
    if dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
        return Peers(rank=rank, world=world, data_rank=rank, data_world=world)
    return Peers()


def _as_error(error: BaseException, what: str) -> ShardfitError:
    if isinstance(error, ShardfitError):
        return error
    if isinstance(error, CheckpointException):
        parts = {f"{type(cause).__name__}: {cause}": rank for rank, (cause, _) in error.failures.items()}
        evidence = "; ".join(f"rank {rank}: {text}" for text, rank in parts.items())
    else:
        evidence = f"{type(error).__name__}: {error}"
    made = ShardfitError(what, evidence=evidence, exit_status=EXIT_COULD_NOT_RUN)
    made.__cause__ = error
    return made


def _joined(errors: list[ShardfitError | None]) -> ShardfitError:
    """One error of those of all ranks; ranks that saw the same are named together."""
    seen: dict[str, tuple[ShardfitError, list[int]]] = {}
    for rank, error in enumerate(errors):
        if error is not None:
            seen.setdefault(str(error), (error, []))[1].append(rank)
    found = list(seen.values())
    first = found[0][0]
    if len(found) == 1 and len(found[0][1]) == len(errors):
        return first
    parts = [
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: "
        + (error.evidence if error.what == first.what else f"{error.what}; {error.evidence}")
        for error, ranks in found
    ]
    return ShardfitError(
        first.what, evidence=" | ".join(parts), fix=first.fix, code=first.code, exit_status=first.exit_status
    )
