"""What the recorder tells of faults, of ranks that don't run alike, of wrappers and of itself."""

from __future__ import annotations

import pytest

from record import record
from test_recorder import HEAD, LOOP, PLAIN, assert_same, mean_losses

FAULTS = {
    "optimizer built before sharding": (
        """
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
fully_shard(model)
""",
        {
            "orphans": ["0.weight", "0.bias", "2.weight", "2.bias"],
            "not_in_optimizer": ["0.weight", "0.bias", "2.weight", "2.bias"],
        },
    ),
    "forward called directly": (
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
    def forward(self, x):
        return self.layer(x)
net = Net()
fully_shard(net.layer)
fully_shard(net)
model = net.forward
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
""",
        {"forward_called_directly": ["Net"]},
    ),
    "gradients never reduced": (
        """
model = nn.Sequential(nn.Linear(8, 4))
fully_shard(model)
model.set_requires_gradient_sync(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
""",
        {
            "unsynced": [0, 1],
            "unsynced_units": [""],
            "missing_grads": {"0": ["0.weight", "0.bias"], "1": ["0.weight", "0.bias"]},
        },
    ),
    "root not sharded": (
        """
model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
fully_shard(model[0])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
""",
        {"root_sharded": False, "unsharded": ["1.weight", "1.bias"]},
    ),
    "reduction in bf16": (
        """
model = nn.Sequential(nn.Linear(8, 4))
fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
""",
        {"root_sharded": True},
    ),
    "batch not sliced": (
        """
mine = lambda t: t
model = nn.Sequential(nn.Linear(8, 4))
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
""",
        {"draws": "alike"},
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_leave_their_facts(name, tmp_path):
    build, expected = FAULTS[name]
    loop = """
for step in range(2):
    torch.manual_seed(step)
    x, y = torch.randn(8, 8), torch.randint(4, (8,))
    F.cross_entropy(model(mine(x)), mine(y)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    recording = record(tmp_path, HEAD + build + loop, ranks=2)
    for rank in recording.ranks:
        assert {fact: rank.facts.get(fact) for fact in expected} == expected, rank.trace
    facts, steps = recording.ranks[0].facts, [rank.steps for rank in recording.ranks]
    if name == "optimizer built before sharding":
        parts = {(p.name, p.in_model, p.in_optimizer) for p in recording.ranks[0].parts}
        assert ("0.weight", True, 0) in parts
        assert ("0.weight", False, 1) in parts
        assert steps[0][0].squares["0.weight"] > 0
    elif name == "root not sharded":
        assert steps[0][0].weights["1.weight"] != steps[1][0].weights["1.weight"]
        assert "0.weight" not in steps[0][0].weights
    elif name == "reduction in bf16":
        assert facts["fsdp_units"][0]["reduce_dtype"] == "bfloat16"
    elif name == "batch not sliced":
        assert steps[0][0].inputs == steps[1][0].inputs


def test_ranks_that_do_not_run_alike_go_on(tmp_path):
    source = """
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x, y = torch.randn(8, 8), torch.randint(4, (8,))
    if rank == 0 and step == 1:
        model(x)
    F.cross_entropy(model(mine(x)), mine(y)).backward()
    optimizer.step()
"""
    recording = record(tmp_path, HEAD + source, ranks=2, exchange_seconds=1.0)
    assert [rank.ended for rank in recording.ranks] == ["finished"] * 2
    assert recording.num_steps == 3
    assert any(rank.facts.get("exchange_broken") for rank in recording.ranks)
    assert any(rank.facts["draws"] == "own" for rank in recording.ranks)


def test_recomputed_activations_draw_the_same(tmp_path):
    source = """
from torch.utils.checkpoint import checkpoint
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        self.drop = nn.Dropout(0.5)
    def forward(self, x):
        return self.b(checkpoint(lambda x: self.drop(self.a(x)).relu(), x, use_reentrant=False))
model = Net()
if world > 1:
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
def batch():
    return torch.randn(8, 8), torch.randint(4, (8,))
"""
    original = record(tmp_path / "original", HEAD + source + LOOP)
    candidate = record(tmp_path / "candidate", HEAD + source + LOOP, ranks=2)
    assert_same(original, candidate)
    assert original.ranks[0].facts["forwards"] == [1] * 4


def test_stops_after_a_save_that_one_rank_makes(tmp_path):
    source = """
for step in range(9):
    x, y = batch()
    F.cross_entropy(model(mine(x)), mine(y)).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 2 == 1 and rank == 0:
        torch.save({"step": step}, "ckpt.pt")
"""
    recording = record(tmp_path, HEAD + PLAIN + source, ranks=2, stop_after_save=3)
    assert [(rank.ended, len(rank.steps)) for rank in recording.ranks] == [("stopped", 4)] * 2
    assert [save.after_steps for save in recording.ranks[0].saves] == [2, 4]
    assert recording.ranks[0].facts["save_files"] == [str(tmp_path / "ckpt.pt")] * 2


def test_wrappers_leave_no_trace_in_names(tmp_path):
    source = """
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
model = nn.Sequential(nn.Linear(8, 16), checkpoint_wrapper(nn.Linear(16, 4)))
if world > 1:
    model = DistributedDataParallel(model)
model = torch.compile(model, backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def batch():
    return torch.randn(8, 8), torch.randint(4, (8,))
"""
    original = record(tmp_path / "original", HEAD + source + LOOP)
    candidate = record(tmp_path / "candidate", HEAD + source + LOOP, ranks=2)
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    for rank in original.ranks + candidate.ranks:
        assert "recorder_error" not in rank.facts
        assert [part.name for part in rank.parts] == names, rank.trace
    assert mean_losses(candidate) == pytest.approx(mean_losses(original), rel=1e-5)
    assert [rank.facts["ddp"] for rank in candidate.ranks] == [True, True]
    # Replicas hold the whole gradient each.
    for rank in candidate.ranks:
        assert rank.steps[0].squares == pytest.approx(original.ranks[0].steps[0].squares, rel=1e-5)
        assert rank.steps[3].weights == candidate.ranks[0].steps[3].weights


def test_a_mistake_of_the_recorder_is_not_the_scripts(tmp_path):
    source = """
class Odd:
    def items(self):
        raise RuntimeError("not to be looked at")
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
    def forward(self, odd, x):
        return self.layer(x)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = lambda x: net(Odd(), x)
def batch():
    return torch.randn(8, 8), torch.randint(4, (8,))
"""
    [rank] = record(tmp_path, HEAD + source + LOOP.replace("model.param", "net.param")).ranks
    assert (rank.ended, len(rank.steps)) == ("finished", 4)
    assert "not to be looked at" in rank.facts["recorder_error"]
    assert rank.steps[0].losses
    assert rank.steps[0].squares
