"""A small script on one device, the same under FSDP2 by hand, and faults: one edit of it each.

Plain torch, as a user would write it by hand. `broken(NAME)` is the source of the candidate with that fault.
"""

from __future__ import annotations

COMMON = """
import argparse, os, pathlib, sys
import torch, torch.nn as nn, torch.nn.functional as F

class Block(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 32), nn.Linear(32, dim)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(31, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(16))
        self.head = nn.Linear(16, 31)

    def forward(self, x, y):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x * self.scale).flatten(0, 1), y.flatten())

def get_batch():
    x = torch.randint(31, (8, 6))
    return x, (x * 3 + 1) % 31

ACCUMULATE, STEPS, SAVE_AT = 2, 8, 4
parser = argparse.ArgumentParser()
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()
torch.manual_seed(11)
"""

ORIGINAL = (
    COMMON
    + """
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
for step in range(STEPS):
    for micro in range(ACCUMULATE):
        x, y = get_batch()
        loss = model(x, y) / ACCUMULATE
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
"""
)

RIGHT = (
    COMMON
    + """
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = torch.distributed.init_device_mesh("cpu", (world,))
policy = MixedPrecisionPolicy()
model = Model()
for block in model.blocks:
    fully_shard(block, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
start, saved = 0, pathlib.Path("saved")

def state():
    parts = get_state_dict(model, optimizer)
    return {"model": parts[0], "optimizer": parts[1]}

if args.resume and saved.exists():
    loaded = state()
    dcp.load(loaded, checkpoint_id=saved / "shards")
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    rest = torch.load(saved / "rest.pt", weights_only=True)
    scheduler.load_state_dict(rest["scheduler"])
    torch.set_rng_state(rest["rng"])
    start = rest["step"]

for step in range(start, STEPS):
    for micro in range(ACCUMULATE):
        model.set_requires_gradient_sync(micro == ACCUMULATE - 1)
        x, y = get_batch()
        x, y = x.chunk(world)[rank], y.chunk(world)[rank]
        loss = model(x, y) / ACCUMULATE
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if step + 1 == SAVE_AT:
        dcp.save(state(), checkpoint_id=saved / "shards")
        if rank == 0:
            rest = {"scheduler": scheduler.state_dict(), "rng": torch.get_rng_state(), "step": step + 1}
            torch.save(rest, saved / "rest.pt")
dist.destroy_process_group()
"""
)

_OPTIMIZER = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
_ROOT = "fully_shard(model, mesh=mesh, mp_policy=policy)\n"
_SLICE = "x, y = x.chunk(world)[rank], y.chunk(world)[rank]"

# name: (code, [(text, replacement), ...])
FAULTS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "optimizer-before-sharding": (
        "SF501",
        [(_OPTIMIZER, ""), ("model = Model()\nfor block", "model = Model()\n" + _OPTIMIZER + "for block")],
    ),
    "loss-not-divided": ("SF508", [("model(x, y) / ACCUMULATE", "model(x, y)")]),
    "forward-called": ("SF306", [("loss = model(x, y)", "loss = model.forward(x, y)")]),
    "batch-not-sliced": ("SF601", [(_SLICE, "pass")]),
    "same-part-on-every-rank": ("SF601", [(_SLICE, "x, y = x.chunk(world)[0], y.chunk(world)[0]")]),
    "gradients-unreduced": (
        "SF506",
        [
            (
                "model.set_requires_gradient_sync(micro == ACCUMULATE - 1)",
                "model.set_requires_gradient_sync(False)",
            )
        ],
    ),
    "root-not-sharded": (
        "SF301",
        [
            (_ROOT, ""),
            ("model.set_requires_gradient_sync(", "for b in model.blocks: b.set_requires_gradient_sync("),
            ("clip_grad_norm_(model.parameters()", "clip_grad_norm_(model.blocks.parameters()"),
        ],
    ),
    "reduced-in-bf16": (
        "SF401",
        [("MixedPrecisionPolicy()", "MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)")],
    ),
    "divided-by-world-too": ("SF511", [("/ ACCUMULATE\n", "/ ACCUMULATE / world\n")]),
    "evaluation-mode": ("SF609", [("for step in range(start", "model.eval()\nfor step in range(start")]),
    "old-batch-on-each-rank": (
        "SF605",
        [(_SLICE, "for _ in range(rank): x, y = get_batch()")],
    ),
}
# Seen only when the candidate is started again.
RESUME_FAULTS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "rng-not-restored": ("SF733", [('torch.set_rng_state(rest["rng"])', "pass")]),
    "scheduler-not-restored": ("SF708", [('scheduler.load_state_dict(rest["scheduler"])', "pass")]),
    "optimizer-not-restored": (
        "SF704",
        [("start = rest", "for group in optimizer.param_groups: optimizer.state.clear()\n    start = rest")],
    ),
    "starts-over": ("SF632", [("if args.resume and", "if False and")]),
    "weights-not-restored": (
        "SF705",
        [
            (
                "loaded = state()",
                'loaded = state()\n    old = {k: v.clone() for k, v in loaded["model"].items()}',
            ),
            ('model_state_dict=loaded["model"]', "model_state_dict=old"),
        ],
    ),
}


def broken(name: str) -> str:
    """The candidate with one fault."""
    source = RIGHT
    for text, replacement in {**FAULTS, **RESUME_FAULTS}[name][1]:
        assert source.count(text) == 1, (name, text)
        source = source.replace(text, replacement)
    return source
