"""Ranks for tests: worker processes that are started once and reused.

    from ranks import run_ranks

    def body(ranks, scale):            # a module-level function; runs on every rank
        return (torch.ones(2) * scale).tolist()

    def test_it():
        results = run_ranks(body, world=2, scale=3.0)   # one value per rank

Each job has a process group of its own (gloo) through `init_distributed`, as under torchrun.
A rank that raises fails the test with its traceback. A job over its time limit prints the
stacks of all ranks and the pool is replaced.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

SIZE = 4
LIMIT_SECONDS = 120.0


def run_ranks(
    body: Callable[..., Any],
    *,
    world: int = 2,
    limit_seconds: float = LIMIT_SECONDS,
    init: dict[str, Any] | None = None,
    **arguments: Any,
) -> list[Any]:
    """`body(ranks, **arguments)` on `world` ranks; the value of each, by rank.

    `init` goes to `init_distributed` (replicate=, tensor=). Arguments and values are pickled:
    return plain tensors or numbers.
    """
    global _pool
    if _pool is None:
        _pool = _Pool()
    try:
        return _pool.run(body, world, limit_seconds, init or {}, arguments)
    except _PoolError as broken:
        _pool.close()
        _pool = None
        raise AssertionError(str(broken)) from None


def close_ranks() -> None:
    """End the workers (once, at the end of the test session)."""
    global _pool
    if _pool is not None:
        _pool.close()
        _pool = None


class _PoolError(Exception):
    pass


class _Pool:
    def __init__(self) -> None:
        import torch.distributed as dist

        context = mp.get_context("spawn")
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))
        self.jobs = 0
        self.folder = tempfile.TemporaryDirectory(prefix="shardfit-ranks-")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            dump = str(Path(self.folder.name) / f"stack-{rank}")
            process = context.Process(
                target=_serve, args=(theirs, rank, self.store.port, dump, sys.path), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(
        self,
        body: Callable[..., Any],
        world: int,
        limit_seconds: float,
        init: dict[str, Any],
        arguments: dict[str, Any],
    ) -> list[Any]:
        self.jobs += 1
        job = (body.__module__, body.__qualname__, self.jobs, world, init, arguments)
        for pipe in self.pipes[:world]:
            pipe.send(job)
        deadline = time.monotonic() + limit_seconds
        results: dict[int, tuple[bool, Any]] = {}
        failed_at: float | None = None
        while len(results) < world:
            pending = {self.pipes[r]: r for r in range(world) if r not in results}
            # After a first failure the others get a few seconds: their peers are gone.
            limit = min(deadline, failed_at + 5) if failed_at is not None else deadline
            ready = wait(list(pending), timeout=max(0.0, limit - time.monotonic()))
            if not ready:
                raise _PoolError(self._failure(results, world, limit_seconds))
            for pipe in ready:
                rank = pending[pipe]  # type: ignore[index]
                try:
                    results[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    results[rank] = (False, f"rank {rank} died: exit code {self.processes[rank].exitcode}")
                if not results[rank][0] and failed_at is None:
                    failed_at = time.monotonic()
        if failed_at is not None:
            raise _PoolError(self._failure(results, world, limit_seconds))
        return [results[rank][1] for rank in range(world)]

    def _failure(self, results: dict[int, tuple[bool, Any]], world: int, limit_seconds: float) -> str:
        lines = [f"rank {r}: {value}" for r, (good, value) in sorted(results.items()) if not good]
        if slow := [r for r in range(world) if r not in results]:
            lines.append(f"ranks {slow} did not end (limit {limit_seconds:g} s); their stacks:")
            for rank in slow:
                with contextlib.suppress(OSError, TypeError):
                    os.kill(self.processes[rank].pid, signal.SIGUSR1)  # type: ignore[arg-type]
            time.sleep(1)
            for rank in slow:
                lines.append((Path(self.folder.name) / f"stack-{rank}").read_text())
        return "\n".join(lines)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.folder.cleanup()


_pool: _Pool | None = None


def _serve(pipe: Connection, rank: int, port: int, dump: str, path: list[str]) -> None:
    sys.path[:] = path
    with open(dump, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        import torch

        torch.set_num_threads(1)
        warnings.simplefilter("error")
        while True:
            try:
                job = pipe.recv()
            except EOFError:
                return
            pipe.send(_run_job(rank, port, job))


def _run_job(rank: int, port: int, job: tuple[Any, ...]) -> tuple[bool, Any]:
    import torch

    import shardfit

    module, name, number, world, init, arguments = job
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        # As torchrun does for a restart: each job has its own corner of the store.
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT=str(number),
    )
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            torch.manual_seed(0)
            body: Any = importlib.import_module(module)
            for part in name.split("."):
                body = getattr(body, part)
            ranks = shardfit.init_distributed(device="cpu", start_timeout_seconds=60, **init)
            value = body(ranks, **arguments)
            shardfit.shutdown()
        return True, value
    except BaseException:
        return False, f"{traceback.format_exc()}\n{output.getvalue()}"
