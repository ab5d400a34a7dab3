"""Joining and leaving a run: launchers, devices, time limits, and ranks that fail."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import shardfit
from ranks import run_ranks
from shardfit import ShardfitError
from shardfit.train.launch import current_ranks, patient
from shardfit.train.launcher import Launch, first_host, pick_device, read_launch

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}
LIMIT_SECONDS = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(script: Path, *args: str, env: dict[str, str] | None = None, torchrun: tuple[str, ...] = ()):
    command = [sys.executable]
    if torchrun:
        command += ["-m", "torch.distributed.run", *torchrun]
    clean = {k: v for k, v in os.environ.items() if k not in TORCHRUN and not k.startswith("TORCHELASTIC")}
    return subprocess.Popen(
        [*command, str(script), *args],
        env={**clean, "OMP_NUM_THREADS": "1", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"still running after {LIMIT_SECONDS} s:\n{process.communicate()[0]}") from None
    return process.returncode, output


@pytest.fixture
def script(tmp_path):
    def write(body: str) -> Path:
        file = tmp_path / "script.py"
        head = "import os, sys, time, torch, torch.distributed as dist, shardfit\n"
        file.write_text(head + textwrap.dedent(body))
        return file

    return write


def test_reads_torchrun():
    assert read_launch(TORCHRUN) == Launch("torchrun", 1, 4, 1, None, "h", 29500)


def test_reads_a_slurm_step():
    env = {
        "SLURM_PROCID": "3",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "gpu[03-05,9]",
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
    }
    launch = read_launch(env)
    assert (launch.launcher, launch.rank, launch.world, launch.local_rank) == ("slurm", 3, 8, 1)
    assert launch.master_addr == "gpu03"
    assert 15000 <= launch.master_port < 30000
    assert launch.master_port == read_launch({**env, "SLURM_PROCID": "0"}).master_port
    assert launch.master_port != read_launch({**env, "SLURM_STEP_ID": "1"}).master_port
    assert read_launch({**env, "MASTER_PORT": "1234", "MASTER_ADDR": "x"}).master_port == 1234


def test_a_batch_script_without_srun_is_one_process():
    assert read_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}).world == 1


def test_torchrun_inside_slurm_is_torchrun():
    assert read_launch({**TORCHRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}).launcher == "torchrun"


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[03-05,9],x", "gpu03"),
        ("a[7,9]", "a7"),
        ("rack1-n[2-3].cluster", "rack1-n2.cluster"),
    ],
)
def test_first_host(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_an_incomplete_environment_is_named(missing):
    with pytest.raises(ShardfitError, match=f"missing: {missing}"):
        read_launch({k: v for k, v in TORCHRUN.items() if k != missing})


def test_nonsense_in_the_environment():
    with pytest.raises(ShardfitError, match="RANK='one'"):
        read_launch({**TORCHRUN, "RANK": "one"})
    with pytest.raises(ShardfitError, match="rank 4, world size 4"):
        read_launch({**TORCHRUN, "RANK": "4"})


@pytest.fixture
def gpus(monkeypatch):
    def have(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return have


def test_local_rank_picks_the_gpu(gpus):
    gpus(4)
    assert pick_device(Launch("torchrun", 5, 8, 1)) == torch.device("cuda", 1)
    gpus(0)
    assert pick_device(Launch("torchrun", 5, 8, 1)) == torch.device("cpu")


def test_a_launcher_that_shows_each_rank_one_gpu(gpus):
    gpus(1)
    assert pick_device(Launch("slurm", 5, 8, 3)) == torch.device("cuda", 0)


def test_missing_local_rank_on_a_host_with_several_gpus(gpus):
    gpus(2)
    with pytest.raises(ShardfitError, match=r"SF102(.|\n)*LOCAL_RANK is not set, and the host has 2 GPUs"):
        pick_device(Launch("torchrun", 1, 2, None))


def test_more_ranks_than_gpus(gpus):
    gpus(2)
    with pytest.raises(ShardfitError, match=r"SF102(.|\n)*LOCAL_RANK=2(.|\n)*--nproc-per-node 2"):
        pick_device(Launch("torchrun", 2, 4, 2))


def test_cuda_asked_for_where_there_is_none(gpus):
    gpus(0)
    with pytest.raises(ShardfitError, match="none is there"):
        pick_device(Launch("none"), "cuda")


class Uuid:
    def __init__(self, uuid):
        self.uuid = uuid


@pytest.mark.parametrize(("other", "is_shared"), [("GPU-a", True), ("GPU-b", False)])
def test_two_ranks_on_one_gpu_are_refused(monkeypatch, other, is_shared):
    """Each is shown one GPU as cuda:0: only its name tells whether they are two."""
    from shardfit.train import launch

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Uuid("GPU-a"))
    store = torch.distributed.HashStore()
    store.set("device/1", f"{socket.gethostname()}/{other}")
    arguments = (store, Launch("torchrun", 0, 2, 0), torch.device("cuda", 0))
    if not is_shared:
        launch._refuse_shared_devices(*arguments)
        return
    with pytest.raises(ShardfitError, match=r"SF102(.|\n)*ranks 0 and 1 are both on"):
        launch._refuse_shared_devices(*arguments)


def test_with_a_gpu_the_group_is_nccl_on_that_device(monkeypatch):
    from shardfit.train import launch

    class SeenError(Exception):
        pass

    seen = {}

    def init(backend, **arguments):
        seen.update(arguments, backend=backend)
        raise SeenError

    chosen = []
    monkeypatch.setattr(launch, "pick_device", lambda *_: torch.device("cuda", 3))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(launch.dist, "init_process_group", init)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SeenError):
        shardfit.init_distributed()
    assert chosen == [seen["device_id"]] == [torch.device("cuda", 3)]
    assert seen["backend"] == "cpu:gloo,cuda:nccl"


def test_no_launcher(script):
    file = script("""
        ranks = shardfit.init_distributed()
        total = torch.ones(1, device=ranks.device)
        dist.all_reduce(total)
        print(ranks.rank, ranks.world, ranks.data_rank, ranks.data_world, total.item())
        shardfit.shutdown()
        shardfit.shutdown()
        print(dist.is_initialized())
        ranks = shardfit.init_distributed()   # and again
        print(ranks.world)
    """)
    assert finish(start(file)) == (0, "0 1 0 1 1.0\nFalse\n1\n")


def test_called_twice_and_never():
    with pytest.raises(ShardfitError, match="has not joined a run"):
        current_ranks()
    assert all(run_ranks(call_again))


def call_again(ranks):
    try:
        shardfit.init_distributed()
    except ShardfitError as error:
        return "called twice" in str(error) and current_ranks() is ranks
    return False


FAILS = """
    ranks = shardfit.init_distributed()
    dist.barrier()
    if ranks.rank == 1:
        raise KeyError("first of all")
    {wait}
"""


@pytest.mark.parametrize(
    "wait",
    [
        "time.sleep(500)",
        "dist.barrier(); dist.barrier()",
        "try:\n        time.sleep(500)\n    finally: shardfit.shutdown()",
    ],
    ids=["sleeping", "in-a-collective", "in-a-try"],
)
def test_a_rank_that_fails_ends_the_others(script, wait):
    """Without torchrun, whose agent would end them: the ranks see to it themselves."""
    file = script(FAILS.format(wait=wait))
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [start(file, env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(2)]
    (code0, output0), (code1, output1) = [finish(p) for p in processes]
    assert (code0, code1) == (1, 1)
    assert "KeyError: 'first of all'" in output1
    assert "rank 1 failed" in output0
    assert "Traceback" not in output0


def test_under_torchrun_the_first_error_is_the_one_shown(script):
    file = script(FAILS.format(wait="dist.barrier()"))
    code, output = finish(start(file, torchrun=("--standalone", "--nproc-per-node", "2")))
    assert code == 1
    root_cause = output.split("Root Cause")[1]
    assert "rank      : 1" in root_cause
    assert "KeyError: 'first of all'" in root_cause


def test_a_failing_rank_in_a_finally_does_not_wait(script):
    file = script("""
        ranks = shardfit.init_distributed()
        try:
            if ranks.rank == 0:
                raise KeyError("mine")
            time.sleep(500)
        finally:
            shardfit.shutdown()
    """)
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [start(file, env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(2)]
    (code0, output0), (code1, _) = [finish(p) for p in processes]
    assert (code0, code1) == (1, 1)
    assert "KeyError: 'mine'" in output0


def test_a_rank_that_exits_with_a_status_in_a_try(script):
    file = script("""
        ranks = shardfit.init_distributed()
        try:
            if ranks.rank == 1:
                sys.exit(7)
            time.sleep(500)
        finally:
            shardfit.shutdown()
    """)
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [start(file, env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(2)]
    assert [finish(p)[0] for p in processes] == [1, 7]


def test_ranks_that_leave_at_different_times(script):
    """One is done early and the other late: both end well, without shutdown() too."""
    file = script("""
        ranks = shardfit.init_distributed()
        if ranks.rank == int(sys.argv[1]):
            time.sleep(3)
    """)
    for late in ("0", "1"):
        env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        processes = [start(file, late, env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(2)]
        assert [finish(p) for p in processes] == [(0, ""), (0, "")]


def test_an_elastic_restart(script, tmp_path):
    file = script("""
        ranks = shardfit.init_distributed()
        dist.barrier()
        if ranks.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise KeyError("once")
        total = torch.tensor([ranks.rank + 1.0])
        dist.all_reduce(total)
        print(f"total {total.item()} attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}\\n", end="")
        shardfit.shutdown()
    """)
    code, output = finish(
        start(file, torchrun=("--standalone", "--nproc-per-node", "2", "--max-restarts", "1"))
    )
    assert code == 0, output
    assert output.count("total 3.0 attempt 1") == 2


def test_inside_a_slurm_step(script):
    file = script("""
        ranks = shardfit.init_distributed()
        total = torch.tensor([ranks.rank + 1.0])
        dist.all_reduce(total)
        print(ranks.rank, ranks.local_rank, ranks.world, total.item())
        shardfit.shutdown()
    """)
    env = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": str(time.time_ns() % 10**6),
        "SLURM_STEP_ID": "0",
    }
    processes = [start(file, env={**env, "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)}) for r in range(2)]
    assert [finish(p) for p in processes] == [(0, "0 0 2 3.0\n"), (0, "1 1 2 3.0\n")]


def test_a_port_in_use(script):
    file = script("shardfit.init_distributed(start_timeout_seconds=5)")
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        env = {
            "WORLD_SIZE": "1",
            "RANK": "0",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        code, output = finish(start(file, env=env))
    assert code == 1
    assert "the port at which ranks meet is in use" in output
    assert f"127.0.0.1:{port}" in output


def test_a_rank_that_never_arrives(script):
    file = script("shardfit.init_distributed(start_timeout_seconds=3)")
    env = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for rank in ("0", "1"):
        code, output = finish(start(file, env={**env, "RANK": rank}))
        assert code == 1
        assert "waited 3 s" in output, output
        assert "ShardfitError" in output


def test_the_time_limit_is_short_after_the_first_step(script):
    file = script("""
        ranks = shardfit.init_distributed(start_timeout_seconds=400, step_timeout_seconds=2)
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight])
        if ranks.rank == 1:
            time.sleep(4)          # slower than a step may be: still starting
        dist.barrier()
        weight.grad = torch.ones(1)
        optimizer.step()
        if ranks.rank == 1:
            time.sleep(300)
        dist.barrier()
    """)
    code, output = finish(start(file, torchrun=("--standalone", "--nproc-per-node", "2")))
    assert code == 1
    assert "2000ms" in output, output


def limits(ranks):
    from shardfit import _torch

    seen = []
    original = _torch.set_group_timeout
    _torch.set_group_timeout = lambda group, seconds: seen.append(seconds) or original(group, seconds)
    try:
        with patient():
            pass
        weight = torch.nn.Parameter(torch.ones(1))
        weight.grad = torch.ones(1)
        torch.optim.SGD([weight]).step()
        with patient():
            pass
    finally:
        _torch.set_group_timeout = original
    groups = len(list(_torch.all_groups()))
    return seen[::groups]


def test_patience_ends_where_it_began():
    # Before the first step the limit is the long one anyway; after it, patience is undone.
    assert run_ranks(limits) == [[60, 300.0, 60, 300.0]] * 2
