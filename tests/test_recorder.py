"""What the recorder sees of scripts that know nothing of it."""

from __future__ import annotations

import pytest
import torch

from record import record

HEAD = """
import os, sys
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy

world = int(os.environ.get("WORLD_SIZE", "1"))
rank = int(os.environ.get("RANK", "0"))
if world > 1:
    dist.init_process_group("gloo")

def mine(t):
    n = len(t) // world
    return t[rank * n : (rank + 1) * n]

torch.manual_seed(0)
"""

MLP = """
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(DROPOUT), nn.Linear(16, 4))
if world > 1:
    fully_shard(model[0])
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

def batch():
    return torch.randn(8, 8), torch.randint(4, (8,))
"""

LOOP = """
for step in range(4):
    x, y = batch()
    loss = F.cross_entropy(model(mine(x)), mine(y))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()
"""


def mean_losses(recording):
    return [
        sum(sum(rank.steps[i].losses) for rank in recording.ranks) / len(recording.ranks)
        for i in range(recording.num_steps)
    ]


def norms(recording):
    """Of the whole gradient: sharded parts add up."""
    totals = [
        sum(sum(rank.steps[i].squares.values()) for rank in recording.ranks)
        for i in range(recording.num_steps)
    ]
    return [total**0.5 for total in totals]


def assert_same(original, candidate):
    assert original.num_steps == candidate.num_steps > 0
    assert mean_losses(candidate) == pytest.approx(mean_losses(original), rel=1e-5)
    assert norms(candidate) == pytest.approx(norms(original), rel=1e-5)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return record(tmp_path_factory.mktemp("plain"), HEAD + MLP.replace("DROPOUT", "0.5") + LOOP)


def test_losses_and_gradients_are_those_before_clipping(plain):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(16, 4)
    )
    x, y = torch.randn(8, 8), torch.randint(4, (8,))
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    [rank] = plain.ranks
    assert rank.ended == "finished"
    assert rank.steps[0].losses == (pytest.approx(loss.item(), rel=1e-6),)
    for name, parameter in model.named_parameters():
        expected = parameter.grad.double().square().sum().item()
        assert rank.steps[0].squares[name] == pytest.approx(expected, rel=1e-6)
    assert [clip["max_norm"] for clip in rank.facts["clips"]] == [0.01] * 4
    assert rank.facts["clips"][0]["norm"] == pytest.approx(norms(plain)[0], rel=1e-5)
    assert rank.steps[0].lr == (0.01,)
    assert [(part.name, part.shape, part.spread) for part in rank.parts][:2] == [
        ("0.weight", (16, 8), "whole"),
        ("0.bias", (16,), "whole"),
    ]
    assert rank.facts["draws"] == "one"
    assert rank.facts["fsdp_units"] == []


def test_sharded_script_with_dropout_draws_as_one_process(plain, tmp_path):
    candidate = record(tmp_path, HEAD + MLP.replace("DROPOUT", "0.5") + LOOP, ranks=2)
    assert_same(plain, candidate)
    weights = [torch.load(tmp_path / "record" / f"weights-{r}.pt") for r in range(2)]
    whole = torch.load(f"{plain.folder}/weights-0.pt")
    for part in plain.ranks[0].parts:
        pieces = torch.cat([weights[r][part.name] for r in range(2)])
        torch.testing.assert_close(pieces, whole[part.name], rtol=0, atol=1e-6)
    for rank in candidate.ranks:
        facts = rank.facts
        assert facts["draws"] == "global"
        assert facts["rng"] == plain.ranks[0].facts["rng"]
        assert facts["root_sharded"] is True
        assert facts["forward_called_directly"] == []
        assert facts["orphans"] == facts["unsharded"] == facts["unmoved"] == []
        assert [unit["path"] for unit in facts["fsdp_units"]] == ["", "0"]
        assert rank.parts[0].extent == (8, 8)
        assert rank.parts[0].offset == (8 * rank.rank, 0)
        assert rank.parts[0].spread == "sharded"
    rows = [rank.facts["row_digests"]["0"][0] for rank in candidate.ranks]
    assert rows[0] + rows[1] == plain.ranks[0].facts["row_digests"]["0"][0]


def test_each_rank_drawing_for_itself_would_differ(plain, tmp_path):
    own = """
import contextlib
import shardfit.train.draws
shardfit.train.draws.global_draws = lambda **rows: contextlib.nullcontext()
"""
    candidate = record(tmp_path, HEAD + own + MLP.replace("DROPOUT", "0.5") + LOOP, ranks=2)
    assert mean_losses(candidate) != pytest.approx(mean_losses(plain), rel=1e-3)


def test_ranks_with_seeds_of_their_own_draw_as_the_first(plain, tmp_path):
    source = HEAD + MLP.replace("DROPOUT", "0.5") + LOOP
    seeded = source.replace(
        "x, y = batch()",
        """if step == 0:
        data = torch.Generator()
        data.set_state(torch.get_rng_state())
        torch.manual_seed(100 + rank)
        if rank == 0:
            torch.set_rng_state(data.get_state())
    x, y = batch() if rank == 0 else (torch.empty(8, 8), torch.empty(8, dtype=torch.long))
    dist.broadcast(x, 0)
    dist.broadcast(y, 0)""",
    )
    candidate = record(tmp_path, seeded, ranks=2)
    assert_same(plain, candidate)
    assert all(rank.facts["rng_differs"] for rank in candidate.ranks)


PLAIN = MLP.replace("DROPOUT", "0.0")


def test_steps_with_several_backwards_and_losses(tmp_path):
    source = """
for step in range(3):
    for micro in range(2):
        x, y = batch()
        if world > 1:
            model.set_requires_gradient_sync(micro == 1)
        loss = F.cross_entropy(model(mine(x)), mine(y)) / 2
        loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.grad.mul_(0.1)  # clipping by hand
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model.eval(); model(mine(x)); model.train()
"""
    original = record(tmp_path / "original", HEAD + PLAIN + source)
    candidate = record(tmp_path / "candidate", HEAD + PLAIN + source, ranks=2)
    assert_same(original, candidate)
    [rank] = original.ranks
    assert rank.facts["backwards"] == rank.facts["forwards"] == [2, 2, 2]
    assert [len(step.losses) for step in rank.steps] == [2, 2, 2]
    assert rank.steps[0].rows == (8, 8)
    assert candidate.ranks[1].facts["unsynced"] == []


def test_scaler_takes_its_factor_off(tmp_path):
    source = """
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(3):
    x, y = batch()
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
    scaled = record(tmp_path / "scaled", HEAD + PLAIN + source)
    plain = record(tmp_path / "plain", HEAD + PLAIN + source.replace('"cpu", ', '"cpu", enabled=False, '))
    assert scaled.ranks[0].facts["scales"] == [1024.0] * 3
    assert "scales" not in plain.ranks[0].facts
    assert_same(plain, scaled)


def test_two_optimizers_make_one_step(tmp_path):
    source = """
first, second = nn.Linear(4, 4), nn.Linear(4, 1)
one = torch.optim.SGD(first.parameters(), lr=0.1)
two = torch.optim.Adam(second.parameters(), lr=0.2)
for step in range(5):
    x = torch.randn(6, 4)
    two.zero_grad()
    second(first(x).detach()).mean().backward()
    two.step()
    one.zero_grad()
    second(first(x)).square().mean().backward()
    one.step()
"""
    [rank] = record(tmp_path, HEAD + source, steps=3).ranks
    assert rank.ended == "stopped"
    assert [step.lr for step in rank.steps] == [(0.2, 0.1)] * 3
    assert [len(step.losses) for step in rank.steps] == [2] * 3
    assert [optimizer["steps"] for optimizer in rank.facts["optimizers"]] == [3, 3]
    assert sorted(rank.steps[0].squares) == [
        "Linear0.bias",
        "Linear0.weight",
        "Linear1.bias",
        "Linear1.weight",
    ]


def test_gradients_of_each_optimizer_are_those_it_stepped_with(tmp_path):
    """The second loss goes through the first one's parameters too, and leaves gradients there."""
    source = """
first, second = nn.Linear(4, 4), nn.Linear(4, 1)
one = torch.optim.SGD(first.parameters(), lr=0.1)
two = torch.optim.SGD(second.parameters(), lr=0.2)
for step in range(2):
    x = torch.randn(6, 4)
    two.zero_grad()
    second(first(x).detach()).mean().backward()
    print("two", sum(float(p.grad.double().square().sum()) for p in second.parameters()))
    two.step()
    one.zero_grad()
    second(first(x)).square().mean().backward()
    one.step()
"""
    recording = record(tmp_path, HEAD + source)
    said = (tmp_path / "record" / "output-0.txt").read_text().split()
    seen = [
        sum(value for name, value in step.squares.items() if name.startswith("Linear1"))
        for step in recording.ranks[0].steps
    ]
    assert seen == pytest.approx([float(said[1]), float(said[3])])


def test_closures_and_steps_within_backward(tmp_path):
    closure = """
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
for step in range(3):
    x, y = batch()
    def evaluate():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss
    optimizer.step(evaluate)
"""
    [rank] = record(tmp_path / "closure", HEAD + PLAIN + closure, steps=2).ranks
    assert (rank.ended, len(rank.steps)) == ("stopped", 2)
    assert rank.facts["closure"] is True
    assert len(rank.steps[0].losses) >= 2
    inside = """
optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
def update(p):
    optimizers[p].step()
    p.grad = None
for p in model.parameters():
    p.register_post_accumulate_grad_hook(update)
for step in range(3):
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
"""
    [rank] = record(tmp_path / "inside", HEAD + PLAIN.replace("optimizer = ", "_ = ") + inside, steps=2).ranks
    assert (rank.ended, len(rank.steps)) == ("stopped", 2)
    assert sorted(rank.steps[1].squares) == ["0.bias", "0.weight", "3.bias", "3.weight"]
    assert [len(step.losses) for step in rank.steps] == [1, 1]


def test_a_main_script_with_workers_and_a_sibling(tmp_path):
    (tmp_path / "sibling.py").write_text("SIZE = 8\n")
    source = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset
from sibling import SIZE

class Numbers(Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, i):
        return torch.full((SIZE,), float(i))

def main():
    model = torch.nn.Linear(SIZE, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for context in ("fork", "spawn"):
        loader = DataLoader(Numbers(), batch_size=8, num_workers=1, multiprocessing_context=context)
        for x in loader:
            model(x).mean().backward()
            optimizer.step()
    assert sys.argv[1:] == ["--flag", "a b"], sys.argv
    assert __file__ == sys.argv[0]

if __name__ == "__main__":
    main()
"""
    [rank] = record(tmp_path, source, argv=("--flag", "a b")).ranks
    assert rank.ended == "finished", rank.trace
    assert len(rank.steps) == 8
    assert sorted(file.name for file in (tmp_path / "record").glob("rank-*")) == ["rank-0.json"]


def test_stops_whatever_the_script_catches(tmp_path):
    source = """
for step in range(9):
    try:
        x, y = batch()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    except BaseException:
        pass
    finally:
        optimizer.zero_grad()
    if step == 1:
        torch.save(model.state_dict(), "last.pt")
"""
    [rank] = record(tmp_path, HEAD + PLAIN + source, steps=2).ranks
    assert (rank.ended, len(rank.steps)) == ("stopped", 2)
    assert [(save.after_steps, save.call) for save in rank.saves] == [(2, "torch.save")]


def test_an_error_keeps_its_trace_and_the_steps_before_it(tmp_path):
    source = LOOP.replace("    optimizer.step()", "    optimizer.step()\n    assert step < 2, 'no more'")
    [rank] = record(tmp_path, HEAD + PLAIN + source).ranks
    assert (rank.ended, rank.error, len(rank.steps)) == ("error", "AssertionError: no more", 3)
    assert "script.py" in rank.trace
    assert "parity" not in rank.trace
    assert rank.facts["failed_at"] > 0


def test_a_nonzero_exit_is_an_error(tmp_path):
    assert record(tmp_path / "a", "raise SystemExit(3)").ranks[0].ended == "error"
    assert record(tmp_path / "b", "raise SystemExit(0)").ranks[0].ended == "finished"
