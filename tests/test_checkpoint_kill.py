"""kill -9 at any moment of a save: the newest committed checkpoint loads, and the run goes on.

This file is also the program that is killed: `python test_checkpoint_kill.py MODE FOLDER`. It
imports torch once and forks a process for every kill.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

KEEP = 2


def run_killer(mode, folder):
    """The counts that the program prints at its end."""
    done = subprocess.run(
        [sys.executable, __file__, mode, str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def test_killed_before_every_file_operation_of_a_save(tmp_path):
    """One process; the save also replaces a checkpoint, deletes one, and clears a leftover."""
    counts = run_killer("operations", tmp_path)
    # before the commit the old checkpoint is the newest, after it the new one: both were met
    assert counts["old"] >= 15
    assert counts["new"] >= 5
    assert counts["old"] + counts["new"] == counts["kills"]


def test_either_rank_killed_before_every_file_operation(tmp_path):
    counts = run_killer("operations-of-ranks", tmp_path)
    assert counts["kills"] >= 15
    assert counts["old"] + counts["new"] == counts["kills"]


def test_ranks_killed_at_random_moments(tmp_path):
    """Two ranks save without a pause until one or both are killed, again and again in one folder."""
    counts = run_killer("moments", tmp_path)
    assert counts["kills"] == 16
    assert counts["steps"] >= 4, "saves were committed between the kills; how many, the machine's load says"


# ---- the program


def make_run(folder, keep=KEEP):
    """A model, an optimizer and their checkpointer."""
    import torch

    from shardfit import Checkpointer

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4, bias=False))
    if torch.distributed.is_initialized():
        torch.distributed.fsdp.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    extra = {"value": -1}
    return (
        model,
        optimizer,
        extra,
        Checkpointer(folder, model=model, optimizer=optimizer, extra=extra, keep=keep),
    )


def set_to(run, step):
    """Every number of the run's state becomes `step`."""
    import torch

    model, optimizer, extra, _ = run
    extra["value"] = step
    for param in model.parameters():
        param.data.fill_(step)
        optimizer.state[param] = {
            "step": torch.tensor(float(step)),
            "exp_avg": torch.full_like(param.data, step),
            "exp_avg_sq": torch.full_like(param.data, step),
        }


def holds(run, step):
    """Is every number of the run's state `step`?"""
    model, optimizer, extra, _ = run
    tensors = [p.detach() for p in model.parameters()]
    for state in optimizer.state.values():
        tensors += state.values()
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return extra["value"] == step and len(local) == 12 and all(bool((t == step).all()) for t in local)


def check_folder(folder, allowed):
    """Load the newest in a process that has no group; all that is committed must be whole."""
    from shardfit.checkpoint.layout import list_committed
    from shardfit.checkpoint.verify import verify

    for slot in list_committed(folder):
        report = verify(folder / slot.name)
        assert not report.findings, report.to_text()
    run = make_run(folder)
    step = run[3].resume()
    assert step in allowed, (step, allowed, os.listdir(folder))
    assert step is None or holds(run, step), step
    return step


def kill_at(number):
    """SIGKILL this process before its file operation `number` from now; returns a counter."""
    count = [0]
    # Reads are left out: to die before one is to die after the write before it.
    changes = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}

    def happen(*_):
        count[0] += 1
        if count[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event, arguments):
        writes = event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if (writes or event in changes) and enabled[0]:
            happen()

    enabled = [True]
    sys.addaudithook(hook)
    sync = os.fsync

    def counted_sync(descriptor):
        happen()
        sync(descriptor)

    os.fsync = counted_sync
    return count, enabled


def fork(body, *arguments):
    """A child that runs `body`; it exits 0, or 1 with its traceback shown."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        body(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)


def join(child, seconds=60):
    """Its exit status (negative: the signal); killed and an error after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("a process did not end")


def join_group(rank, world, meeting):
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=20)
    )


def save_and_count(folder, number, answer=None):
    run = make_run(folder, keep=1)
    run[3].resume()
    set_to(run, 2)
    count, enabled = kill_at(number)
    run[3].save(2)
    enabled[0] = False
    if answer is not None:
        os.write(answer, count[0].to_bytes(4, "little"))


def prepare(folder):
    """A committed step 1, and what an earlier kill has left of a save and of a deletion."""
    run = make_run(folder)
    set_to(run, 1)
    run[3].save(1)
    for name in (".step-00000002.saving-0123456789ab0001", ".step-00000000.deleting-0123456789ab"):
        shutil.copytree(folder / "step-00000001", folder / name)
    (folder / ".step-00000002.saving-0123456789ab0001" / "manifest.json").unlink()


def goes_on(folder):
    """After the kill: resume, save, and nothing is left but the new checkpoint."""
    run = make_run(folder, keep=1)
    run[3].resume()
    set_to(run, 3)
    run[3].save(3)
    assert os.listdir(folder) == ["step-00000003"], os.listdir(folder)
    check_folder(folder, {3})


def operations(folder):
    prepare(folder / "base")
    counts = {"old": 0, "new": 0, "kills": 0}
    number = 0
    while True:
        number += 1
        place = folder / str(number)
        shutil.copytree(folder / "base", place)
        status = join(fork(save_and_count, place, number))
        if status == 0:
            break
        assert status == -signal.SIGKILL, status
        counts["kills"] += 1
        counts["new" if check_folder(place, {1, 2}) == 2 else "old"] += 1
        if number % 4 == 0:
            goes_on(place)
        shutil.rmtree(place)
    return counts


def operation_of_rank(folder, rank, doomed, number):
    join_group(rank, 2, folder / "meeting")
    save_and_count(folder / "run", number if rank == doomed else 0)
    os._exit(0)


def operations_of_ranks(folder):
    prepare(folder / "base")
    counts = {"old": 0, "new": 0, "kills": 0}
    for doomed in (0, 1):
        number = 0
        while True:
            # Rank 0 alone was killed at every operation in the other mode: here at some.
            number += 1 if doomed else 7
            place = folder / f"{doomed}-{number}"
            place.mkdir()
            shutil.copytree(folder / "base", place / "run")
            children = [fork(operation_of_rank, place, rank, doomed, number) for rank in range(2)]
            status = join(children[doomed])
            if status == 0:
                assert join(children[1 - doomed]) == 0
                break
            assert status == -signal.SIGKILL, status
            os.kill(children[1 - doomed], signal.SIGKILL)  # as a launcher would
            join(children[1 - doomed])
            counts["kills"] += 1
            counts["new" if check_folder(place / "run", {1, 2}) == 2 else "old"] += 1
            shutil.rmtree(place)
    return counts


def save_for_ever(folder, rank, meeting, answer):
    """Resume, then save step after step; rank 0 says when a save begins, and when it has ended."""
    join_group(rank, 2, meeting)
    run = make_run(folder)
    step = run[3].resume() or 0
    assert step == 0 or holds(run, step), step
    while True:
        step += 1
        set_to(run, step)
        if rank == 0:
            os.write(answer, f"b{step}\n".encode())
        run[3].save(step)
        if rank == 0:
            os.write(answer, f"e{step}\n".encode())


def moments(folder):
    chance = random.Random(0)
    counts = {"kills": 0, "steps": 0}
    place, ended = folder / "run", 0
    for number in range(16):
        reader, writer = os.pipe()
        children = [
            fork(save_for_ever, place, rank, folder / f"meeting-{number}", writer) for rank in range(2)
        ]
        os.close(writer)
        text = b""
        # From the first save on, some moment of the next few.
        moment = None
        while moment is None or time.monotonic() < moment:
            wait = 30.0 if moment is None else max(0.0, moment - time.monotonic())
            if select.select([reader], [], [], wait)[0]:
                piece = os.read(reader, 4096)
                assert piece, "a rank has failed"
                text += piece
                moment = moment or time.monotonic() + chance.uniform(0, 0.25)
        for child in chance.choice([children, children[:1], children[1:]]):
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.kill(child, signal.SIGKILL) if chance.random() < 0.5 else time.sleep(0.02)
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            join(child)
        while piece := os.read(reader, 4096):
            text += piece
        os.close(reader)
        begun = max(int(word[1:]) for word in text.decode().split())
        ended = max([ended, *(int(word[1:]) for word in text.decode().split() if word[0] == "e")])
        # A save is begun on top of the one before; what has been begun may be there, and is
        # where the save has returned.
        allowed = {begun} if ended == begun else {begun - 1 or None, begun}
        assert join(fork(check_folder, place, allowed)) == 0
        counts["kills"] += 1
    counts["steps"] = ended
    return counts


def main(mode, folder):
    import torch
    import torch.distributed.fsdp

    import shardfit.train.shard  # noqa: F401

    torch.set_num_threads(1)
    make_run(Path(folder))  # what is imported on the way is imported before the forks
    modes = {"operations": operations, "operations-of-ranks": operations_of_ranks, "moments": moments}
    print(json.dumps(modes[mode](Path(folder))))


if __name__ == "__main__":
    main(*sys.argv[1:])
