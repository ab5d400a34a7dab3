"""What the launcher says: torchrun's variables, Slurm's, or none; and the device it means."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shardfit.errors import ShardfitError

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """What the launcher's environment says. `launcher` is "torchrun", "slurm" or "none"."""

    launcher: str
    rank: int = 0
    world: int = 1
    local_rank: int | None = 0
    local_world: int | None = None
    master_addr: str = "127.0.0.1"
    master_port: int = 0


def read_launch(env: Mapping[str, str]) -> Launch:
    """The rank's place from torchrun's variables, else Slurm's step, else a single process.

    Raises:
        ShardfitError: some variables are there and others missing, or they contradict.
    """
    if "RANK" in env or "WORLD_SIZE" in env:
        if missing := [name for name in _TORCHRUN if not env.get(name)]:
            raise ShardfitError(
                "the launcher's environment is incomplete",
                evidence=f"set: {', '.join(n for n in _TORCHRUN if env.get(n))}; "
                f"missing: {', '.join(missing)}",
                fix="launch with torchrun --nproc-per-node N, or set all four",
                code="SF103",
            )
        local = env.get("LOCAL_RANK")
        launch = Launch(
            "torchrun",
            _number(env, "RANK"),
            _number(env, "WORLD_SIZE"),
            _number(env, "LOCAL_RANK") if local else None,
            _number(env, "LOCAL_WORLD_SIZE") if env.get("LOCAL_WORLD_SIZE") else None,
            env["MASTER_ADDR"],
            _number(env, "MASTER_PORT"),
        )
    # SLURM_STEP_NUM_TASKS is set inside `srun` only: a plain `python` in a batch script of
    # many tasks is one process, and must not wait for the others.
    elif env.get("SLURM_STEP_NUM_TASKS") and env.get("SLURM_PROCID"):
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or socket.gethostname()
        job = int(re.sub(r"\D", "", env.get("SLURM_JOB_ID", "")) or 0)
        step = int(re.sub(r"\D", "", env.get("SLURM_STEP_ID", "")) or 0)
        launch = Launch(
            "slurm",
            _number(env, "SLURM_PROCID"),
            _number(env, "SLURM_STEP_NUM_TASKS"),
            _number(env, "SLURM_LOCALID") if env.get("SLURM_LOCALID") else None,
            None,
            env.get("MASTER_ADDR") or first_host(nodes),
            _number(env, "MASTER_PORT")
            if env.get("MASTER_PORT")
            # Jobs that share a host must not share a port; below the ephemeral range.
            else 15000 + (job * 7 + step) % 15000,
        )
    else:
        return Launch("none")
    if not 0 <= launch.rank < launch.world:
        raise ShardfitError(
            "the rank is not below the world size",
            evidence=f"rank {launch.rank}, world size {launch.world}, from {launch.launcher}",
            fix="launch with torchrun, or mend the variables",
        )
    return launch


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: "gpu[03-05,9],login" gives "gpu03"."""
    match = re.match(r"([^\[,]+)(?:\[([^\]]*)\])?([^,\[]*)", nodes)
    if not match:
        return nodes
    stem, inside, tail = match.groups()
    return stem if inside is None else stem + re.split(r"[-,]", inside)[0] + tail


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ShardfitError(
            f"{name} is not a whole number", evidence=f"{name}={env[name]!r}", fix="launch with torchrun"
        ) from None


def pick_device(launch: Launch, device: str | torch.device | None = None) -> torch.device:
    """The rank's device: its own GPU where there are any, otherwise the CPU.

    Raises:
        ShardfitError: LOCAL_RANK is missing on a host with several GPUs, or there are more
            ranks on the host than GPUs (SF102).
    """
    if device is not None and torch.device(device).type != "cuda":
        return torch.device(device)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        if device is not None:
            raise ShardfitError(
                "a CUDA device was asked for and none is there",
                evidence=f"device={device!r}, torch.cuda.device_count() is 0",
                fix='leave device out, or pass device="cpu"',
            )
        return torch.device("cpu")
    if launch.local_rank is None:
        if count > 1:
            raise ShardfitError(
                "this rank can't tell which GPU is its own",
                evidence=f"LOCAL_RANK is not set, and the host has {count} GPUs",
                fix="launch with torchrun, which sets LOCAL_RANK, or export it",
                code="SF102",
            )
        return torch.device("cuda", 0)
    if launch.local_rank < count:
        return torch.device("cuda", launch.local_rank)
    if count == 1:
        # A launcher may show each rank one GPU; whether they are different ones is
        # checked by `init_distributed`.
        return torch.device("cuda", 0)
    raise ShardfitError(
        "there are more ranks on this host than GPUs",
        evidence=f"LOCAL_RANK={launch.local_rank}, torch.cuda.device_count() is {count}",
        fix=f"launch at most {count} processes on it (torchrun --nproc-per-node {count})",
        code="SF102",
    )
