"""Runs of whole scripts under torchrun: copies, stops, resumes, hangs, failures."""

from __future__ import annotations

import os
import time

import pytest

from shardfit.errors import ShardfitError
from shardfit.parity.run import (
    follow,
    record_candidate,
    saved_step,
    start_candidate,
    start_original,
    start_resumed,
)
from shardfit.parity.scratch import copy_for_run, make_own

ORIGINAL = """
import torch
from torch import nn
from model import build, batch

torch.manual_seed(0)
model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(100):
    x, y = batch()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    open("log.txt", "a").write(f"{step}\\n")
"""

MODEL = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))

def batch():
    return torch.randn(8, 8), torch.randint(4, (8,))
"""

CANDIDATE = """
import os, sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from model import build, batch

class State:
    step = 0

    def state_dict(self):
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optim": moments, "step": self.step, "rng": torch.get_rng_state()}

    def load_state_dict(self, state):
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        torch.set_rng_state(state["rng"])
        self.step = state["step"]

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = build()
fully_shard(model[0])
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
state = State()
if "--resume" in sys.argv:
    dcp.load({"app": state}, checkpoint_id="ckpt")
while state.step < 100:
    x, y = (t.chunk(world)[rank] for t in batch())
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    state.step += 1
    if state.step % 3 == 0:
        dcp.save({"app": state}, checkpoint_id="ckpt")
"""


def mean_losses(recording):
    return [
        sum(rank.steps[i].losses[0] for rank in recording.ranks) / len(recording.ranks)
        for i in range(recording.num_steps)
    ]


def test_a_candidate_trains_resumes_and_leaves_the_folder_alone(tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    files = {"train.py": ORIGINAL, "train_fsdp2.py": CANDIDATE, "model.py": MODEL, "log.txt": "mine\n"}
    for name, text in files.items():
        (project / name).write_text(text)
    out = tmp_path / "out"
    original = start_original("train.py", folder=out / "original", steps=8, cwd=project)
    candidate = start_candidate("train_fsdp2.py", folder=out / "candidate", steps=8, cwd=project)
    seen = [candidate.num_steps for _ in follow([original, candidate])]
    assert seen == sorted(seen)
    assert original.num_steps == candidate.num_steps == 8
    whole = mean_losses(original.recording())
    assert mean_losses(candidate.recording()) == pytest.approx(whole, rel=1e-5)
    assert [rank.ended for rank in candidate.recording().ranks] == ["stopped", "stopped"]
    # The first save is at 3; the first at or after half of the steps is at 6.
    assert saved_step(candidate) == 6
    resumed = [
        start_resumed(candidate, folder=out / f"resumed-{ranks}", ranks=ranks, resume_args=["--resume"])
        for ranks in (2, 4)
    ]
    assert None not in resumed
    for _ in follow(resumed):
        pass
    for run in resumed:
        recording = run.recording()
        assert [rank.ended for rank in recording.ranks] == ["stopped"] * run.world
        assert all(rank.first_step == 6 for rank in recording.ranks)
        assert [read["call"] for read in recording.ranks[0].facts["reads"]] == ["dcp.load"]
        assert mean_losses(recording) == pytest.approx(whole[6:], rel=1e-5)
    assert {file.name: file.read_text() for file in project.iterdir() if file.is_file()} == files
    assert not (project / "ckpt").exists()


def test_a_candidate_that_hangs_is_ended_with_its_stacks(tmp_path):
    (tmp_path / "hang.py").write_text(
        """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()

def wait_for_the_other():
    dist.all_reduce(torch.ones(1))

if dist.get_rank() == 0:
    wait_for_the_other()
else:
    import time
    time.sleep(1000)
"""
    )
    run = start_candidate("hang.py", folder=tmp_path / "out", cwd=tmp_path, timeout_seconds=10)
    for _ in follow([run]):
        pass
    ranks = run.recording().ranks
    assert [rank.ended for rank in ranks] == ["hang", "hang"]
    assert "wait_for_the_other" in ranks[0].stacks
    assert "hang.py" in ranks[1].stacks
    assert [len(rank.steps) for rank in ranks] == [1, 1]
    assert all(not _is_alive(progress.pid) for progress in run._progress)


def test_the_rank_that_fails_first_is_told_from_those_that_follow(tmp_path):
    (tmp_path / "fail.py").write_text(
        """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    dist.all_reduce(torch.ones(1))
    if step == 1 and dist.get_rank() == 1:
        raise ValueError("rank 1 has had enough")
"""
    )
    recording = record_candidate("fail.py", folder=tmp_path / "out", cwd=tmp_path, steps=5)
    assert [rank.ended for rank in recording.ranks] == ["error", "error"]
    assert recording.ranks[1].error == "ValueError: rank 1 has had enough"
    assert len(recording.ranks[1].steps) == 2
    first = recording.ranks[0]
    assert "rank 1 failed" in first.error or first.facts["failed_at"] > recording.ranks[1].facts["failed_at"]


def test_runs_left_early_leave_no_process(tmp_path):
    (tmp_path / "train.py").write_text(
        """
import torch, time
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    time.sleep(0.1)
"""
    )
    run = start_original("train.py", folder=tmp_path / "out", cwd=tmp_path, steps=10_000)
    followed = follow([run])
    for _ in followed:
        if run.num_steps:
            break
    followed.close()
    assert not _is_alive(run._progress[0].pid)


def _is_alive(pid):
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


def test_no_such_script(tmp_path):
    with pytest.raises(ShardfitError, match="no such script"):
        start_original("nothing.py", folder=tmp_path / "out", cwd=tmp_path)


def test_a_copy_holds_what_the_script_needs(tmp_path):
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    (project / ".git").mkdir()
    (project / ".git" / "config").write_text("x")
    (project / "env").mkdir()
    (project / "env" / "pyvenv.cfg").write_text("x")
    (project / "src" / "train.py").write_text("pass")
    (project / "large.bin").write_bytes(b"0" * (9 << 20))
    elsewhere = tmp_path / "data"
    elsewhere.mkdir()
    (elsewhere / "notes.txt").write_text("mine")
    (project / "data").symlink_to(elsewhere)
    argv = [
        "--out",
        str(project / "runs"),
        f"--data={project}/data",
        "runs",
        str(elsewhere),
        "../data",
        "--lr=1",
    ]
    scratch = copy_for_run("src/train.py", tmp_path / "copy", argv=argv, cwd=project)
    copy = tmp_path / "copy"
    assert scratch.script == copy / "src" / "train.py"
    assert scratch.cwd == copy
    expected = (
        "--out",
        f"{copy}/runs",
        f"--data={copy}/data",
        "runs",
        str(elsewhere),
        str(elsewhere),
        "--lr=1",
    )
    assert scratch.argv == expected
    assert not (copy / ".git").exists()
    assert not (copy / "env").exists()
    # Folders are never links: what the script writes there stays in the copy.
    (copy / "data" / "notes.txt").write_text("the script's")
    assert (elsewhere / "notes.txt").read_text() == "mine"
    assert (copy / "large.bin").is_symlink()
    make_own(copy / "large.bin", copy, keep=True)
    assert not (copy / "large.bin").is_symlink()
    assert (copy / "large.bin").stat().st_size == 9 << 20
    moved = scratch.moved(tmp_path / "again")
    assert moved.argv[1] == f"{tmp_path}/again/runs"


def test_a_script_elsewhere_runs_in_a_copy_of_its_own_folder(tmp_path):
    (tmp_path / "project").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "text.txt").write_text("x")
    (tmp_path / "project" / "train.py").write_text("pass")
    scratch = copy_for_run(
        tmp_path / "project" / "train.py", tmp_path / "copy", argv=["text.txt", "new"], cwd=tmp_path / "here"
    )
    assert scratch.cwd == tmp_path / "copy"
    assert scratch.argv == (str(tmp_path / "here" / "text.txt"), "new")
