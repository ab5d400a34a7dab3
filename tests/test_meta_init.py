"""Plain meta builds: the model's own initialisation must write every tensor, at any world size alike."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn as nn

from ranks import run_ranks
from shardfit import ShardfitError, shard
from shardfit.train.init import take_recording
from shardfit.train.materialize import materialize
from shardfit.train.metainit import record_initialisation


class Block(nn.Module):
    """Bare parameters, as in PyTorch's FSDP2 example: `reset_parameters` of its own or none at all."""

    def __init__(self, dim=48):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.scale = nn.Parameter(torch.ones(dim, dim))
        self.up = nn.Linear(dim, 3 * dim + 1)
        self.down = nn.Linear(3 * dim + 1, dim)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x @ self.scale)).relu())


class GoodBlock(Block):
    def reset_parameters(self):
        nn.init.ones_(self.scale)


class Model(nn.Module):
    def __init__(self, block=GoodBlock, table=False):
        super().__init__()
        self.embedding = nn.Embedding(100, 48, padding_idx=0)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(48, 100, bias=False)
        self.head.weight = self.embedding.weight
        if table:
            self.register_buffer("table", torch.arange(48.0), persistent=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class WithInitWeights(Model):
    def __init__(self):
        super().__init__(Block, table=True)

    @torch.no_grad()
    def init_weights(self, std=0.02):
        self.table.copy_(torch.arange(48.0))
        for block in self.blocks:
            nn.init.trunc_normal_(block.scale, std=std)


class WithApply(Model):
    def __init__(self):
        super().__init__(Block)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
        if isinstance(module, Block):
            nn.init.normal_(module.scale, std=0.02)


def on_meta(make):
    with torch.device("meta"):
        return make()


def filled(model):
    materialize(model, record_initialisation(model), device=torch.device("cpu"))
    return model


def test_default_initialisation_is_bitwise_that_of_a_plain_build():
    torch.manual_seed(3)
    plain = Model()
    torch.manual_seed(3)
    model = filled(on_meta(Model))
    for name, value in plain.named_parameters():
        assert torch.equal(value, model.get_parameter(name)), name
    assert model.head.weight is model.embedding.weight
    assert (model.embedding.weight[0] == 0).all(), "the padding row"


@pytest.mark.parametrize("make", [WithInitWeights, WithApply])
def test_the_models_own_methods_run(make):
    torch.manual_seed(3)
    model = filled(on_meta(make))
    assert all(0.01 < block.scale.std() < 0.03 for block in model.blocks)
    if make is WithInitWeights:
        assert torch.equal(model.table, torch.arange(48.0))
    else:
        weight = model.blocks[0].down.weight
        assert torch.allclose(weight @ weight.T, torch.eye(48), atol=1e-5)


@pytest.mark.parametrize(
    ("make", "code", "names"),
    [
        (lambda: Model(Block), "SF212", ["blocks.0.scale", "blocks.1.scale", "blocks.2.scale"]),
        (lambda: Model(table=True), "SF203", ["table"]),
        (lambda: nn.ParameterList([torch.zeros(3, 3)]), "SF201", ["0"]),
        (lambda: nn.Sequential(nn.BatchNorm1d(4), nn.PReLU(), HalfReset()), "SF202", ["2.other"]),
    ],
    ids=["bare-parameter", "buffer", "nothing-at-all", "reset-that-forgets"],
)
def test_what_nothing_wrote_is_named_and_the_model_is_untouched(make, code, names):
    model = on_meta(make)
    before = list(model.parameters())
    with pytest.raises(ShardfitError) as raised:
        record_initialisation(model)
    assert raised.value.code == code
    assert all(name in raised.value.evidence for name in names)
    assert f"{len(names)} of " in raised.value.evidence
    assert all(now is then and now.is_meta for now, then in zip(model.parameters(), before, strict=True))


class HalfReset(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.zeros(4))
        self.other = nn.Parameter(torch.zeros(4))

    def reset_parameters(self):
        nn.init.zeros_(self.one)


def sharded_meta(ranks, make):
    torch.manual_seed(3)
    whole = filled(on_meta(globals()[make]))
    torch.manual_seed(3)
    model = on_meta(globals()[make])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shard(model)
        loss = model(torch.arange(8).view(2, 4)).square().mean()
    differing = [
        n for n, p in model.named_parameters() if not torch.equal(p.full_tensor(), whole.get_parameter(n))
    ]
    return differing, model.head.weight is model.embedding.weight, bool(loss.isfinite())


@pytest.mark.parametrize("world", [2, 4])
def test_the_same_weights_at_any_world_size(world):
    """Rows of one rank must not repeat those of another, and fans are those of the whole (SF214, SF208)."""
    for make in ("WithInitWeights", "WithApply"):
        assert run_ranks(sharded_meta, world=world, make=make) == [([], True, True)] * world


def unwritten_blocks(ranks):
    model = on_meta(lambda: Model(Block))
    try:
        shard(model)
    except ShardfitError as error:
        return error.code, any(hasattr(m, "unshard") for m in model.modules())
    return None


def test_shard_refuses_a_model_with_unwritten_blocks_before_it_touches_it():
    assert run_ranks(unwritten_blocks) == [("SF212", False)] * 2


def test_materialize_without_a_recording_names_what_it_cannot_fill():
    model = on_meta(lambda: nn.Linear(3, 3))
    assert take_recording(model) is None
    with pytest.raises(ShardfitError, match=r"SF201(.|\n)*weight, bias"):
        materialize(model, None, device=torch.device("cpu"))


def test_a_partly_written_parameter_is_named():
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(8, 8))

        def reset_parameters(self):
            with torch.no_grad():
                self.weight[:4].zero_()

    with pytest.raises(ShardfitError, match=r"weight"):
        filled(on_meta(Partly))


def test_a_copy_of_something_unwritten_is_not_written():
    class Copies(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(8, 8))
            self.other = nn.Parameter(torch.empty(8, 8))

        def reset_parameters(self):
            with torch.no_grad():
                self.weight.copy_(torch.empty(8, 8).to(torch.float64))
                self.other.copy_(torch.ones(8, 8))

    with pytest.raises(ShardfitError, match="1 of 2: weight"):
        filled(on_meta(Copies))


class Feedforward(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(2)
        )
        self.head = nn.Linear(64, 64)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tensor_parallel(ranks):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def parallelize(model):
        for block in model.blocks:
            styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(block, ranks.mesh["tensor"], styles)

    torch.manual_seed(0)
    plain = Feedforward()
    torch.manual_seed(0)
    model = on_meta(Feedforward)
    parallelize(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shard(model)
        output = model(torch.ones(4, 64))
    same = [torch.equal(p.full_tensor(), plain.get_parameter(n)) for n, p in model.named_parameters()]
    return all(same), torch.allclose(output, plain(torch.ones(4, 64)), atol=1e-5)


def test_beside_a_tensor_axis():
    results = run_ranks(tensor_parallel, world=4, init={"tensor": 2})
    assert results == [(True, True)] * 4
