"""Start and end of a run: process group, device, mesh, time limits."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardfit import _torch
from shardfit.errors import ShardfitError
from shardfit.train.failure import FailureWatch
from shardfit.train.launcher import Launch, pick_device, read_launch
from shardfit.train.mesh import data_mesh, make_mesh

START_TIMEOUT_SECONDS = 1800.0
STEP_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class Ranks:
    """This process's place in the run.

    Attributes:
        rank: global rank, from 0.
        world: number of ranks.
        local_rank: rank on this host, from 0.
        device: the device that this rank computes on.
        mesh: axes by name, see `make_mesh`.
    """

    rank: int
    world: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def data_mesh(self) -> DeviceMesh:
        """The data axes of the mesh ("replicate", "shard"), without "tensor"."""
        return data_mesh(self.mesh)

    @property
    def data_world(self) -> int:
        """Number of ranks that get different data."""
        return self.data_mesh.size()

    @property
    def data_rank(self) -> int:
        """This rank's place among those; ranks that differ only on "tensor" share it."""
        place = 0
        mesh = self.data_mesh
        coordinate = mesh.get_coordinate() or [0] * mesh.ndim
        for dim, index in enumerate(coordinate):
            place = place * mesh.size(dim) + index
        return place

    @property
    def is_first(self) -> bool:
        """True on global rank 0: the one that prints and writes."""
        return self.rank == 0


@dataclass
class _Run:
    """What `init_distributed` set up, for `shutdown` to take down."""

    ranks: Ranks
    owns_group: bool
    start_timeout_seconds: float
    step_timeout_seconds: float
    store: dist.Store | None
    watch: FailureWatch | None
    first_step_hook: Any = None


_run: _Run | None = None
_joined: Counter[str] = Counter()


def init_distributed(
    *,
    replicate: int = 1,
    shard: int | None = None,
    tensor: int = 1,
    device: str | torch.device | None = None,
    start_timeout_seconds: float = START_TIMEOUT_SECONDS,
    step_timeout_seconds: float = STEP_TIMEOUT_SECONDS,
) -> Ranks:
    """Join the run: process group, this rank's device, and the mesh.

    Works under torchrun (also after an elastic restart), inside a Slurm step (`srun`), and
    with no launcher at all, as one process. With GPUs the group is NCCL for their tensors
    and gloo for the CPU's, otherwise gloo. A group that the script has already made is
    used as it is.

    From here on an exception that ends one rank ends the others too, within seconds, and
    only the first one is shown. End the script with `shutdown()`.

    Args:
        replicate, shard, tensor: sizes of the mesh axes, see `make_mesh`.
        device: "cpu" or "cuda". None: CUDA where there is any.
        start_timeout_seconds: limit of a collective until the first optimizer step, while
            ranks build and load at different speeds; also within `patient()`.
        step_timeout_seconds: limit of a collective after that.

    Raises:
        ShardfitError: an incomplete environment, a GPU shared by two ranks or none to be
            told (SF102), a port in use, ranks that don't arrive, a mesh that does not fit
            the world (SF104).
    """
    global _run
    if _run is not None:
        raise ShardfitError(
            "init_distributed() was called twice",
            evidence=f"this process is rank {_run.ranks.rank} of {_run.ranks.world} already",
            fix="keep the Ranks of the first call, or call shutdown() before",
        )
    launch = read_launch(os.environ)
    place = pick_device(launch, device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    owns_group = not dist.is_initialized()
    store = watch = None
    if owns_group:
        store = _join_store(launch, start_timeout_seconds)
        if launch.world > 1:
            # From here on: a rank that fails while others still look for it must end them too.
            watch = FailureWatch(store, launch.rank, launch.world)
            watch.start()
        if place.type == "cuda" and launch.world > 1:
            _refuse_shared_devices(store, launch, place)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo",
            store=store,
            rank=launch.rank,
            world_size=launch.world,
            timeout=timedelta(seconds=start_timeout_seconds),
            device_id=place if place.type == "cuda" else None,
        )
        if watch is not None:
            watch.take_exceptions()
    try:
        mesh = make_mesh(place, replicate=replicate, shard=shard, tensor=tensor)
    except BaseException:
        if owns_group:
            dist.destroy_process_group()
        raise
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), launch.local_rank or 0, place, mesh)
    _run = _Run(ranks, owns_group, start_timeout_seconds, step_timeout_seconds, store, watch)
    _set_timeout(start_timeout_seconds)
    _run.first_step_hook = register_optimizer_step_post_hook(_after_first_step)
    atexit.register(shutdown)
    return ranks


def current_ranks() -> Ranks:
    """The `Ranks` that `init_distributed` returned in this process.

    Raises:
        ShardfitError: it has not been called.
    """
    if _run is None:
        raise ShardfitError(
            "this process has not joined a run",
            evidence="init_distributed() has not been called, or shutdown() has",
            fix="call ranks = init_distributed() at the start of the script",
        )
    return _run.ranks


def shutdown() -> None:
    """Leave the run: wait for the other ranks, then take the process group down.

    It waits for at most the time limit of a step. Called while an exception is on its way (in
    a `finally`), it doesn't wait: the exception ends this rank and then the others. Safe to
    call twice, or without `init_distributed`; called at exit where the script doesn't.
    """
    global _run
    run = _run
    if run is None:
        return
    failing = sys.exc_info()[1]
    if failing is not None and not isinstance(failing, SystemExit):
        # The excepthook reports it and ends the process; until then the watch stays.
        return
    _run = None
    atexit.unregister(shutdown)
    if run.first_step_hook is not None:
        run.first_step_hook.remove()
    if run.owns_group and dist.is_initialized():
        if run.watch is not None and run.store is not None:
            if isinstance(failing, SystemExit) and failing.code not in (None, 0):
                run.watch.claim()
            else:
                _leave_together(run.store, run.watch, run.ranks, run.step_timeout_seconds)
            run.watch.stop()
        dist.destroy_process_group()


def _leave_together(store: dist.Store, watch: FailureWatch, ranks: Ranks, timeout_seconds: float) -> None:
    """Wait in the store, not in a collective, which might pair with one that a peer is still in."""
    store.set(f"left/{ranks.rank}", "")
    store.wait([f"left/{r}" for r in range(ranks.world)], timedelta(seconds=timeout_seconds))
    watch.expect_the_end()
    # Rank 0 may host the store: the others must have read it before it goes.
    store.set(f"gone/{ranks.rank}", "")
    if ranks.is_first:
        store.wait([f"gone/{r}" for r in range(ranks.world)], timedelta(seconds=timeout_seconds))


@contextlib.contextmanager
def patient() -> Iterator[None]:
    """Within it collectives have the long time limit of the start: for loading, or a slow save."""
    if _run is None:
        yield
        return
    waiting = _run.first_step_hook is not None
    _set_timeout(_run.start_timeout_seconds)
    try:
        yield
    finally:
        if not waiting and _run is not None:
            _set_timeout(_run.step_timeout_seconds)


def _after_first_step(*_: Any) -> None:
    if _run is not None and _run.first_step_hook is not None:
        _run.first_step_hook.remove()
        _run.first_step_hook = None
        _set_timeout(_run.step_timeout_seconds)


def _set_timeout(seconds: float) -> None:
    for group in _torch.all_groups():
        _torch.set_group_timeout(group, seconds)


def _join_store(launch: Launch, timeout_seconds: float) -> dist.Store:
    """The store in which ranks find each other; a launcher-less process has its own."""
    if launch.launcher == "none":
        return dist.HashStore()
    os.environ.setdefault("MASTER_ADDR", launch.master_addr)
    os.environ.setdefault("MASTER_PORT", str(launch.master_port))
    address = f"{launch.master_addr}:{launch.master_port}"
    try:
        store, _, _ = next(
            rendezvous(
                "env://",
                rank=launch.rank,
                world_size=launch.world,
                timeout=timedelta(seconds=timeout_seconds),
            )
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise ShardfitError(
                "the port at which ranks meet is in use",
                evidence=f"{address} on rank {launch.rank}",
                fix="end the run that holds it, or choose another (torchrun --standalone, or MASTER_PORT)",
                exit_status=3,
            ) from None
        raise ShardfitError(
            "rank 0 could not be reached",
            evidence=f"rank {launch.rank} waited {timeout_seconds:g} s for {address}: {error}",
            fix="check that rank 0 runs and that MASTER_ADDR and MASTER_PORT are its own",
            exit_status=3,
        ) from None
    except dist.DistStoreError as error:
        raise ShardfitError(
            "not all ranks arrived",
            evidence=f"rank {launch.rank} of {launch.world} waited {timeout_seconds:g} s at {address}: "
            f"{error}",
            fix="start every rank of the launch, with the same world size",
            exit_status=3,
        ) from None
    store.set_timeout(timedelta(seconds=timeout_seconds))
    # Keys of an earlier group in the same store would send ranks to dead addresses.
    attempt = f"{address}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    _joined[attempt] += 1
    return dist.PrefixStore(f"shardfit/{attempt}/{_joined[attempt]}", store)


def _refuse_shared_devices(store: dist.Store, launch: Launch, device: torch.device) -> None:
    """Each rank says which GPU it has; two with one would hang in NCCL's first collective."""
    uuid = torch.cuda.get_device_properties(device).uuid
    store.set(f"device/{launch.rank}", f"{socket.gethostname()}/{uuid}")
    seen: dict[str, int] = {}
    for rank in range(launch.world):
        name = store.get(f"device/{rank}").decode()
        if name in seen:
            raise ShardfitError(
                "two ranks have the same GPU",
                evidence=f"ranks {seen[name]} and {rank} are both on {name}",
                fix="launch at most one process a GPU; let LOCAL_RANK, not a fixed number, pick it",
                code="SF102",
            )
        seen[name] = rank
