"""What goes into the model: digests of the inputs, and random draws brought in line between ranks."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardfit import _torch
from shardfit.parity.observe_modules import digest

_MAX_ROWS = 512


class Exchange:
    """Values that the ranks' recorders tell each other, in a store of their own.

    A rank that doesn't come within the limit breaks it for good: nothing waits again.

    Args:
        folder: of the recording; rank 0 leaves the store's port there.
        timeout_seconds: how long a rank waits for the others.
    """

    def __init__(self, folder: Path, *, rank: int, world: int, timeout_seconds: float) -> None:
        self.rank = rank
        self.world = world
        self.broken = ""
        self._limit = timedelta(seconds=timeout_seconds)
        self._store: dist.Store | None = None
        self._port_file = folder / "store-port"
        if world > 1 and rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=self._limit)
            part = self._port_file.with_suffix(".part")
            part.write_text(str(store.port))
            part.replace(self._port_file)
            self._store = store

    def all(self, key: str, value: Any, *, timeout_seconds: float | None = None) -> list[Any] | None:
        """Every rank's JSON-able value under `key`, by rank. None: not all ranks came, or had come before."""
        if self.world == 1:
            return [value]
        if self.broken:
            return None
        limit = self._limit if timeout_seconds is None else timedelta(seconds=timeout_seconds)
        try:
            store = self._connect()
            store.set(f"{key}/{self.rank}", json.dumps(value))
            keys = [f"{key}/{rank}" for rank in range(self.world)]
            store.wait(keys, limit)
            return [json.loads(store.get(name)) for name in keys]
        except (RuntimeError, OSError, ValueError) as error:
            self.broken = f"{key}: {str(error).splitlines()[0][:200]}"
            return None

    def _connect(self) -> dist.Store:
        if self._store is None:
            end = time.monotonic() + self._limit.total_seconds()
            while not self._port_file.exists() and time.monotonic() < end:
                time.sleep(0.01)
            port = int(self._port_file.read_text())
            self._store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=self._limit)
        return self._store


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists, dicts and objects with a dict's items, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "items") and not isinstance(value, type):
        for _, item in value.items():
            yield from tensors_in(item)


def digest_inputs(tensors: list[Tensor]) -> tuple[str, int | None]:
    """One digest of all, and the rows: the size of dim 0 of the first that has dims (None: none has)."""
    parts = [f"{tuple(t.shape)}{t.dtype}{digest(_torch.local_of(t))}" for t in tensors]
    rows = next((t.shape[0] for t in tensors if t.ndim), None)
    return hashlib.blake2b("".join(parts).encode(), digest_size=8).hexdigest(), rows


def digest_rows(tensors: list[Tensor], rows: int | None) -> list[str]:
    """A digest of each row over all tensors that have as many."""
    having = [_torch.local_of(t).detach().cpu() for t in tensors if t.ndim and t.shape[0] == rows]
    joined = ["".join(digest(t[row]) for t in having) for row in range(min(rows or 0, _MAX_ROWS))]
    return [hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for text in joined]


def generator_digest() -> str:
    """Of torch's CPU generator."""
    return digest(torch.get_rng_state())


@dataclass
class Draws:
    """How the model's draws are made on this rank, decided anew at each forward."""

    how: str = "one"
    why: str = ""
    differs: bool = False
    rows: tuple[int, int, int] | None = None
    _restore: list[Tensor] = field(default_factory=list)

    def align(
        self, key: str, mine: dict[str, Any], values: list[dict[str, Any]] | None, exchange: Exchange
    ) -> None:
        """Take rows, digests and generators of all ranks (`mine` and the others') into account."""
        self.rows = None
        if values is None:
            self.how, self.why = "own", f"the ranks do not run alike: {exchange.broken}"
            return
        if len({value["rng"] for value in values}) > 1:
            self.differs = True
            self._follow_first(key, exchange)
        by_place = {value["place"]: value for value in reversed(values)}
        if len(by_place) == 1:
            self.how = "one"
        elif len({value["digest"] for value in by_place.values()}) == 1:
            self.how = "alike"
        elif any(not value["rows"] for value in by_place.values()):
            self.how, self.why = "own", "a rank's inputs have no rows"
        else:
            self.how = "global"
            start = sum(value["rows"] for place, value in by_place.items() if place < mine["place"])
            total = sum(value["rows"] for value in by_place.values())
            self.rows = (total, start, mine["rows"])

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """Within it draws are made so: for the forward, and for its backward (recomputed activations)."""
        if self.rows is None:
            yield
            return
        from shardfit.train.draws import global_draws

        total, start, num = self.rows
        with global_draws(total_rows=total, start_row=start, num_rows=num):
            yield

    def after_forward(self) -> None:
        """Give this rank its own generators back."""
        if self._restore:
            _set_states(self._restore)
            self._restore = []

    def _follow_first(self, key: str, exchange: Exchange) -> None:
        states = _states()
        mine = [base64.b64encode(bytes(s.tolist())).decode() for s in states] if exchange.rank == 0 else []
        first = (exchange.all(f"{key}/rng", mine) or [[]])[0]
        if exchange.rank and len(first) == len(states):
            self._restore = states
            _set_states([torch.tensor(list(base64.b64decode(s)), dtype=torch.uint8) for s in first])


def _states() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    return states


def _set_states(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])
