"""The command line: quickly in this process, and one real proof of a small pair of scripts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shardfit
from shardfit.cli.main import main
from shardfit.findings import Report

ORIGINAL = """
import os, sys
import torch

steps, saves = 6, "--save" in sys.argv
torch.manual_seed(0)
if "--fail" in sys.argv:
    raise RuntimeError("no data")
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
start = 0
if "--resume" in sys.argv:
    state = torch.load("state.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    start = state["step"]
for step in range(start, steps):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if saves:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(state | {"rng": torch.get_rng_state()}, "state.pt")
"""
SLEEPS = "import os, time\nopen('pid', 'w').write(str(os.getpid()))\nwhile True: time.sleep(0.1)\n"


@pytest.fixture
def pair(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(ORIGINAL)
    (tmp_path / "faster.py").write_text(ORIGINAL.replace("lr=0.1", "lr=0.2"))
    return tmp_path


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"shardfit {shardfit.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["party"], "there is no verb 'party'; did you mean 'parity'?"),
        (["zzz"], "there are: parity"),
        ([], "usage: shardfit"),
        (["parity"], "required: ORIGINAL, CANDIDATE"),
        (["parity", "a.py"], "required: CANDIDATE"),
        (["parity", "a.py", "b.py"], "there is no such script\n  seen: a.py"),
        (["parity", "train.py", "b.py"], "there is no such script\n  seen: b.py"),
        (["parity", "train.py", "train.py", "--steps", "x"], "--steps: invalid int"),
        (["parity", "train.py", "train.py", "--steps", "0"], "steps must be at least 1"),
        (["parity", "train.py", "train.py", "--ranks", "-1"], "ranks must be at least 1"),
        (["parity", "train.py", "train.py", "--resume-ranks", "2", "0"], "resume ranks must be at least 1"),
        (["parity", "train.py", "train.py", "--resume-at", "20"], "step 20 of 20"),
        (["parity", "train.py", "train.py", "--keep", "."], "is not empty"),
        (["parity", "train.py", "train.py", "--save-every", "1"], "unrecognized arguments: --save-every"),
    ],
)
def test_wrong_usage_is_2_and_says_what_is_wrong(pair, capsys, arguments, said):
    before = sorted(pair.iterdir())
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert said in output.err
    assert not output.out
    assert "Traceback" not in output.err
    assert sorted(pair.iterdir()) == before


def test_help_has_an_example(capsys):
    assert main(["parity", "--help"]) == 0
    said = capsys.readouterr().out
    assert "$ shardfit parity" in said
    assert "the same: " in said
    assert max(map(len, said.splitlines())) <= 100


def test_help_and_wrong_usage_need_no_torch(pair):
    code = (
        "import sys\nfrom shardfit.cli.main import main\n"
        "main(['--help']); main(['parity', '--help']); main(['parity', 'a', 'b']); main(['nothing'])\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_failing_original_is_3_with_its_own_trace(pair, capsys):
    assert main(["parity", "train.py", "train.py", "--html", "p.html", "--json", "-", "--", "--fail"]) == 3
    output = capsys.readouterr()
    assert "RuntimeError: no data" in output.err
    assert str(pair / "train.py") in output.err
    assert "could not compare" in output.err
    assert json.loads(output.out)["exit_status"] == 3
    assert "RuntimeError: no data" in (pair / "p.html").read_text()


def test_a_proof_with_resume(pair):
    """One real run from the command line; a script is the same as itself, on one rank."""
    command = [sys.executable, "-m", "shardfit", "parity", "train.py", "train.py", "--ranks", "1"]
    command += ["--steps", "6", "--resume-at", "3", "--resume-ranks", "1", "--resume-args=--resume"]
    command += ["--json", "-", "--html", "out/page.html", "--keep", "runs", "--", "--save"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    report = Report.from_json(done.stdout)
    assert report.findings == ()
    assert {row["what"]: row["verdict"] for row in report.data["rows"]} == {
        "loss": "same",
        "gradient norm, unclipped": "same",
        "learning rate": "same",
        "final weights (4)": "same",
        "resume at 3, 1 rank": "same",
    }
    assert len(report.data["curves"]["loss"]["candidate"]) == 6
    assert len(report.data["resumes"][0]["curves"]["loss"]["candidate"]) == 3
    assert report.data["peak_bytes"]["candidate"][0]["host"] > 50 << 20
    assert "6 steps on 1 rank, and resumed on 1 rank" in done.stderr
    assert "candidate, 1 rank: step 6 of 6" in done.stderr
    assert (pair / "out" / "page.html").read_text().startswith("<!doctype html>")
    assert sorted(file.name for file in (pair / "out").iterdir()) == ["page.html"]
    assert (pair / "runs" / "candidate" / "record" / "rank-0.json").exists()
    assert not (pair / "state.pt").exists(), "the runs are in copies"


def test_another_learning_rate_is_1(pair, capsys):
    assert main(["parity", "train.py", "faster.py", "--ranks", "1", "--steps", "3"]) == 1
    said = capsys.readouterr().out
    assert "NOT THE SAME" in said
    assert "differs: loss, gradient norm, unclipped, learning rate" in " ".join(said.split())
    assert "resume was not checked: the candidate saved nothing" in " ".join(said.split())


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for processes in /proc")
def test_an_interrupted_proof_leaves_no_process(pair):
    (pair / "sleeps.py").write_text(SLEEPS)
    command = [sys.executable, "-m", "shardfit", "parity", "sleeps.py", "sleeps.py", "--keep", "runs"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    files = [pair / "runs" / which / "scratch" / "pid" for which in ("original", "candidate")]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in said
    pids = [int(file.read_text()) for file in files]
    wait_for(lambda: not any(is_alive(pid) for pid in pids))


def wait_for(happens, seconds=120.0):
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_a_resume_that_was_not_asked_for_is_not_a_fault(pair, capsys):
    arguments = ["parity", "train.py", "train.py", "--ranks", "1", "--resume-ranks", "1", "--steps", "4"]
    assert main([*arguments, "--", "--save"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "it read no checkpoint and began at step 0; give --resume-args" in said
    assert said.endswith("4 steps on 1 rank (not checked: resume at 2, 1 rank)")
