"""What shard refuses, all at once and before anything is touched; and what it carries over."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from model_zoo import Block, Branches, LanguageModel, Reader, run
from ranks import run_ranks
from shardfit import MeshShape, Plan, Precision, ShardfitError, Unit, plan_of, plan_units, shard


def root(*units):
    return Plan(units=(*(Unit(paths=u if isinstance(u, tuple) else (u,)) for u in units), Unit(paths=("",))))


def scalar(m):
    m.scale = nn.Parameter(torch.tensor(1.0))


def two_dtypes(m):
    m.layers[1].up.bfloat16()


def sparse(m):
    m.embed.sparse = True


def renormed(m):
    m.embed.max_norm = 1.0


def hooked(m):
    m.norm.weight.register_hook(lambda g: g)


def lazy(m):
    m.lazy = nn.LazyLinear(3)


def cached(m):
    m.layers.config = type("Config", (), {"use_cache": True})()


def batch_normed(m):
    m.more = nn.BatchNorm1d(4)


FAULTS = {
    "no such path": (root("layers.7"), None, r"not in the model.*\n.*layers\.\d"),
    "container": (root("layers"), None, r"SF308.*\n.*ModuleList\n.*layers\.\*"),
    "nothing inside": (
        root("layers.0.up", "layers.0.down", "layers.0.norm", "layers.0"),
        None,
        "no parameters",
    ),
    "tied": (root("embed"), lambda m: setattr(m.head, "weight", m.embed.weight), r"SF304.*\n.*embed\.weight"),
    "scalar": (None, scalar, r"SF329.*\n.*scale"),
    "dtypes": (None, two_dtypes, r"SF309.*\n.*layers\.1"),
    "sparse": (None, sparse, "SF330"),
    "max_norm": (None, renormed, "SF219"),
    "hook": (None, hooked, r"SF334.*\n.*norm\.weight"),
    "lazy": (None, lazy, "lazy parameter"),
    "method": (root().replace(methods=("translate",)), None, "LanguageModel.translate"),
    "mesh": (root().replace(mesh=MeshShape(replicate=2)), None, "SF104"),
    "reshard": (Plan(units=(Unit(paths=("",), reshard=3),)), None, "reshard=3, shard axis 2"),
    "no blocks": (root().replace(checkpointing="full"), None, "no repeated blocks"),
    "cache": (root("layers.0", "layers.1").replace(checkpointing="full"), cached, r"layers\.config"),
    "batch norm": (root().replace(precision=Precision(param="bfloat16")), batch_normed, "SF409"),
    "twice": (
        Plan(units=(Unit(paths=("layers.0",)), Unit(paths=("layers.2",)), Unit(paths=("",)))),
        lambda m: m.layers.__setitem__(2, m.layers[0]),
        "SF317",
    ),
    "several": (root("layers.7", "layers"), scalar, r"3 reasons[\s\S]*layers\.7[\s\S]*SF308[\s\S]*SF329"),
}


def refused(ranks):
    messages = {}
    for kind, (plan, change, _) in FAULTS.items():
        model = LanguageModel()
        if change:
            change(model)
        before = {n: (id(p), type(p)) for n, p in model.named_parameters()}
        try:
            shard(model, plan, ranks)
        except ShardfitError as error:
            messages[kind] = str(error)
        else:
            messages[kind] = "not refused"
            continue
        assert before == {n: (id(p), type(p)) for n, p in model.named_parameters()}, kind
        assert not any(isinstance(m, FSDPModule) for m in model.modules()), kind
        assert plan_of(model) is None
    return messages


@pytest.fixture(scope="module")
def refusals():
    return run_ranks(refused)


@pytest.mark.parametrize("kind", FAULTS)
def test_faults_are_refused_before_anything_is_touched(refusals, kind):
    for messages in refusals:
        assert re.search(FAULTS[kind][2], messages[kind]), messages[kind]


def wrapped(ranks):
    messages = []

    def attempt(model):
        try:
            shard(model, None, ranks)
        except ShardfitError as error:
            messages.append(str(error))
        else:
            messages.append("not refused")

    attempt(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    ddp = DistributedDataParallel(Block())
    attempt(ddp)
    attempt(ddp.module)
    inner = ddp.module
    del ddp
    attempt(inner)
    sharded = shard(Block(), None, ranks)
    attempt(sharded)
    by_hand = LanguageModel()
    fully_shard(by_hand.layers[0], mesh=ranks.data_mesh)
    attempt(by_hand)
    return messages


def test_models_that_are_wrapped_or_sharded_already():
    optimizer, ddp, inside, freed, sharded, by_hand = run_ranks(wrapped)[0]
    assert "only a module can be sharded" in optimizer
    assert "SF314" in ddp
    assert "SF324" in inside
    assert freed == "not refused"
    assert "SF319" in sharded
    assert "layers.0 is a FSDPBlock" in by_hand


def differing(ranks):
    messages = {}
    for what in DIFFERENCES:
        torch.manual_seed(ranks.rank if what == "seed" else 0)
        model = LanguageModel(depth=4 if what == "shape" and ranks.rank == 1 else 3)
        model.register_buffer("table", torch.zeros(3), persistent=False)
        plan = None
        if what == "one value" and ranks.rank == 1:
            with torch.no_grad():
                model.layers[2].down.bias[3] += 1e-7
        elif what == "buffer" and ranks.rank == 1:
            model.table.add_(1)
        elif what == "weights on one rank" and ranks.rank == 1:
            model.to("meta")
        elif what == "plan" and ranks.rank == 1:
            plan = plan_units(model, units=["layers.0"])
        try:
            shard(model, plan, ranks)
        except ShardfitError as error:
            messages[what] = str(error)
        else:
            messages[what] = "not refused"
    return messages


DIFFERENCES = {
    "seed": "SF205",
    "one value": "layers.2.down.bias is the first of 1",
    "buffer": "SF218",
    "shape": "different models",
    "plan": "different plans",
    "weights on one rank": "on all with weights or on none",
    "nothing": "not refused",
}


@pytest.mark.parametrize(("world", "init"), [(2, {}), (4, {"replicate": 2})])
def test_ranks_that_differ(world, init):
    for messages in run_ranks(differing, world=world, init=init):
        for what, expected in DIFFERENCES.items():
            assert expected in messages[what], (what, messages[what])


def carried(ranks):
    model = LanguageModel(tied=True)
    model.norm.weight.decay = False
    model.embed.weight.rate = 0.5
    fired = []
    model.norm.bias.register_post_accumulate_grad_hook(lambda p: fired.append(type(p)))
    model.layers[0].up.weight.data = model.layers[0].up.weight.data.t().contiguous().t()
    shard(model, None, ranks)
    assert model.head.weight is model.embed.weight
    run(model, {"x": torch.zeros(2, 8, dtype=torch.long)}).backward()
    return model.norm.weight.decay, model.head.weight.rate, fired == [DTensor], len(list(model.parameters()))


def test_attributes_hooks_and_ties_are_carried_over():
    assert run_ranks(carried) == [(False, 0.5, True, 22)] * 2


def unused(ranks):
    torch.manual_seed(0)
    model = Branches()
    nn.init.eye_(model.base.weight)
    alone = copy.deepcopy(model)
    x = torch.randn(1, 4)
    batch = torch.cat([x.abs() + 1, -x.abs() - 1])
    shard(model, None, ranks)
    model(batch[ranks.rank : ranks.rank + 1]).square().mean().backward()
    (sum(alone(row[None]).square().mean() for row in batch) / 2).backward()
    expected = dict(alone.named_parameters())
    for name, p in model.named_parameters():
        want = expected[name].grad
        torch.testing.assert_close(
            p.grad.full_tensor(), torch.zeros_like(p.grad.full_tensor()) if want is None else want
        )
    return True


@pytest.mark.skipif(not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="needs torch 2.13")
def test_parameters_that_only_some_ranks_use():
    assert run_ranks(unused) == [True, True]


def root_reads(ranks):
    model = shard(Reader(), None, ranks)
    assert all("head" not in unit.paths for unit in plan_of(model).units)
    return [p.placements[0].dim for p in model.parameters()]


def test_a_weight_that_the_root_reads_stays_with_it():
    run_ranks(root_reads)
