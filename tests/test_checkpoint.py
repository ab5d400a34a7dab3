"""Checkpointer: what is saved comes back, at any world size, mesh and division into units."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ranks import run_ranks
from shardfit import (
    Checkpointer,
    Manifest,
    Plan,
    ShardfitError,
    load_checkpoint,
    plan_of,
    shard,
)

WORLD_SIZES = [1, 2, 4]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Tied embedding, a frozen parameter, one that no gradient reaches, both kinds of buffer."""

    def __init__(self, width: int = 6, words: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(5))
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("ramp", torch.arange(3.0), persistent=False)

    def forward(self, ids):
        self.seen += 1
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale.sum() * self.ramp[1]


def build(ranks=None, *, units="blocks", seed=0, cls=torch.optim.AdamW, split=False, **options):
    """A model, an optimizer and two schedulers; the weights depend on the seed only."""
    for seeder in (random.seed, np.random.seed, torch.manual_seed):
        seeder(seed)
    model = Net()
    if ranks is not None:
        if "tensor" in ranks.mesh.mesh_dim_names:
            layout = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
            parallelize_module(model, ranks.mesh["tensor"], layout)
        frozen = {model.scale}
        if units == "blocks":
            for block in model.blocks:
                fully_shard(block, mesh=ranks.data_mesh)
        fully_shard(model, mesh=ranks.data_mesh, ignored_params=frozen)
    named = dict(model.named_parameters())
    if split:  # other groups, in another order
        groups = [
            {
                "params": [p for n, p in reversed(named.items()) if "norm" in n],
                "weight_decay": 0.0,
                "lr": 0.02,
            },
            {"params": [p for n, p in named.items() if "norm" not in n and "blocks" in n]},
            {"params": [p for n, p in named.items() if "blocks" not in n]},
        ]
    else:
        groups = [
            {"params": [p for n, p in named.items() if "norm" not in n]},
            {"params": [p for n, p in named.items() if "norm" in n], "weight_decay": 0.0, "lr": 0.02},
        ]
    optimizer = cls(groups, **{"lr": 0.05, **options})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return model, optimizer, scheduler


def train(model, optimizer, scheduler, steps):
    """Every rank does the whole batch, so that results are those of one process."""
    losses = []
    for step in steps:
        ids = torch.randint(0, 7, (4, 3), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def tiny(cls=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return model, cls(model.parameters(), **{"lr": 0.1, **options})


def advance(model, optimizer, num_steps, offset=0):
    for number in range(num_steps):
        generator = torch.Generator().manual_seed(offset + number)
        model(torch.randn(5, 3, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(value):
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def snapshot(model, optimizer, scheduler):
    """Everything that a resume must bring back, by name, in whole plain tensors."""
    names = {param: name for name, param in model.named_parameters()}
    return {
        "model": {name: whole(value) for name, value in model.state_dict().items()},
        "state": {
            names[param]: {key: whole(value) for key, value in state.items()}
            for param, state in optimizer.state.items()
        },
        "hyper": {
            names[param]: (group["lr"], group["weight_decay"], group["initial_lr"])
            for group in optimizer.param_groups
            for param in group["params"]
        },
        "scheduler": (scheduler.last_epoch, scheduler._step_count),
        "base_lr": {
            names[param]: (base, last)
            for group, base, last in zip(
                optimizer.param_groups, scheduler.base_lrs, scheduler.get_last_lr(), strict=True
            )
            for param in group["params"]
        },
    }


def assert_same(one, other, path=""):
    assert type(one) is type(other), path
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, path
        assert torch.equal(one, other), path
    else:
        assert one == other, path


def save_body(ranks, folder, build_options):
    parts = build(ranks, **build_options)
    train(*parts, range(3))
    model, optimizer, scheduler = parts
    Checkpointer(folder, model=model, optimizer=optimizer, scheduler=scheduler).save(3)
    taken = snapshot(*parts)
    return taken, train(*parts, range(3, 5))


def resume_body(ranks, folder, build_options):
    parts = build(ranks, **{**build_options, "seed": 7})
    model, optimizer, scheduler = parts
    step = Checkpointer(folder, model=model, optimizer=optimizer, scheduler=scheduler).resume()
    taken = snapshot(*parts)
    return step, taken, train(*parts, range(3, 5))


def resume_alone(folder, **build_options):
    return resume_body(None, folder, build_options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of one training at several shapes, made once."""
    made = {}

    def get(world, **init):
        key = (world, *init.items())
        if key not in made:
            folder = tmp_path_factory.mktemp("saved")
            results = run_ranks(save_body, world=world, init=init, folder=folder, build_options={})
            made[key] = (folder, *results[0])
        return made[key]

    return get


SHAPES = [(1, {}), (2, {}), (4, {}), (4, {"replicate": 2}), (4, {"tensor": 2})]
ROUTES = [
    (SHAPES[1], SHAPES[1], {}),
    (SHAPES[1], SHAPES[2], {}),
    (SHAPES[2], SHAPES[1], {"units": "root"}),
    (SHAPES[2], SHAPES[3], {"split": True}),
    (SHAPES[3], SHAPES[4], {}),
    (SHAPES[4], SHAPES[2], {"units": "root", "split": True}),
    (SHAPES[4], SHAPES[0], {}),
    (SHAPES[1], None, {}),
    (SHAPES[4], None, {"split": True}),
]


@pytest.mark.parametrize(("source", "target", "options"), ROUTES)
def test_resume_at_another_shape(saved, source, target, options):
    world, init = source
    folder, before, losses = saved(world, **init)
    if target is None:
        results = [resume_alone(folder, **options)]
    else:
        results = run_ranks(
            resume_body, world=target[0], init=target[1], folder=folder, build_options=options
        )
    for step, after, resumed in results:
        assert step == 3
        assert_same(before, after)
        assert resumed == pytest.approx(losses, rel=1e-5)


# ---- what each rank has of its own


class Loader:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def own_state_body(ranks, folder, save, differs):
    """What each rank has of its own: a loader's position, and random state."""
    loader = Loader({"at": (10 * ranks.data_rank if differs else 0, "x")} if save else None)
    model = nn.Linear(1, 1)
    torch.manual_seed((ranks.data_rank if differs else 0) if save else 1000 + ranks.rank)
    random.seed(5 if save else ranks.rank)
    np.random.seed(5)
    checkpointer = Checkpointer(folder, model=model, loader=loader)
    said = error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            checkpointer.save(1) if save else checkpointer.resume()
        except ShardfitError as raised:
            error = str(raised)
    said = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    return loader.state, torch.rand(1).item(), random.random(), said, error


def draws(seed):
    return torch.rand(1, generator=torch.Generator().manual_seed(seed)).item()


def test_what_each_rank_has_of_its_own(tmp_path):
    run_ranks(own_state_body, world=2, folder=tmp_path / "same", save=True, differs=False)
    run_ranks(own_state_body, world=2, folder=tmp_path / "differs", save=True, differs=True)
    python = random.Random(5).random()

    back = run_ranks(own_state_body, world=2, folder=tmp_path / "differs", save=False, differs=True)
    assert [b[0] for b in back] == [{"at": (0, "x")}, {"at": (10, "x")}]
    assert [b[1] for b in back] == [draws(0), draws(1)]
    assert [b[2:] for b in back] == [(python, [], None)] * 2

    # 2 data ranks again, each now on 2 tensor ranks
    init = {"tensor": 2}
    back = run_ranks(
        own_state_body, world=4, init=init, folder=tmp_path / "differs", save=False, differs=True
    )
    assert [b[0]["at"][0] for b in back] == [0, 0, 10, 10]
    assert [b[1] for b in back] == [draws(0), draws(0), draws(1), draws(1)]
    assert [b[2:] for b in back] == [(python, [], None)] * 4

    # what was the same on all ranks is so at any world size
    back = run_ranks(own_state_body, world=4, folder=tmp_path / "same", save=False, differs=True)
    assert [b[0] for b in back] == [{"at": (0, "x")}] * 4
    assert [b[1] for b in back] == [draws(0)] * 4
    assert [b[2:] for b in back] == [(python, [], None)] * 4

    # positions that differ can't be divided anew
    back = run_ranks(own_state_body, world=4, folder=tmp_path / "differs", save=False, differs=True)
    assert all("the loader's position differed between the 2 data ranks" in b[4] for b in back)
    assert [b[0] for b in back] == [None] * 4


def random_only_body(ranks, folder):
    model = nn.Linear(1, 1)
    torch.manual_seed(1000 + ranks.rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Checkpointer(folder, model=model).resume()
    return torch.rand(1).item(), [str(w.message) for w in caught if issubclass(w.category, UserWarning)]


def test_random_state_at_another_world_size(tmp_path):
    run_ranks(own_state_body, world=2, folder=tmp_path, save=True, differs=True)
    back = run_ranks(random_only_body, world=4, folder=tmp_path)
    assert [b[0] for b in back] == [draws(0), draws(1), draws(1002), draws(1003)]
    assert "random states (torch) differed between the 2 data ranks" in back[0][1][0]
    assert [b[1] for b in back[1:]] == [[]] * 3


def ema_body(ranks, folder, save):
    torch.manual_seed(0)
    model = Net()
    fully_shard(model, mesh=ranks.data_mesh, ignored_params={model.scale})
    values = {name: torch.full_like(p, 2.0 if save else 0.0) for name, p in model.named_parameters()}
    if save:
        generator = torch.Generator().manual_seed(0)
        for value in values.values():
            whole_value = torch.rand(value.shape, generator=generator)
            value.add_(
                distribute_tensor(whole_value, value.device_mesh, value.placements)
                if isinstance(value, DTensor)
                else whole_value
            )
    ema = Loader(values)
    checkpointer = Checkpointer(folder, model=model, extra={"ema": ema})
    checkpointer.save(1) if save else checkpointer.resume()
    kinds = {name: isinstance(value, DTensor) for name, value in ema.state.items()}
    return kinds, {name: whole(value) for name, value in ema.state.items()}


def test_extra_objects_may_hold_sharded_tensors(tmp_path):
    kinds, expected = run_ranks(ema_body, world=2, folder=tmp_path, save=True)[0]
    for kinds_now, values in run_ranks(ema_body, world=4, folder=tmp_path, save=False):
        assert kinds_now == kinds
        assert kinds["embed.weight"]
        assert_same(values, expected)


def plain_body(ranks, folder, save):
    """A model that is not sharded, on several ranks."""
    model, optimizer = tiny()
    model = nn.parallel.DistributedDataParallel(model)
    if save:
        advance(model, optimizer, 2)
    checkpointer = Checkpointer(folder, model=model, optimizer=optimizer)
    checkpointer.save(2) if save else checkpointer.resume()
    advance(model, optimizer, 1, offset=2)
    return [p.detach().clone() for p in model.parameters()]


def test_a_model_that_is_not_sharded(tmp_path):
    expected = run_ranks(plain_body, world=2, folder=tmp_path, save=True)
    resumed = run_ranks(plain_body, world=2, folder=tmp_path, save=False)
    model, optimizer = tiny()
    load_checkpoint(tmp_path, model=model, optimizer=optimizer)
    advance(model, optimizer, 1, offset=2)
    for weights in (*resumed, list(model.parameters())):
        assert all(torch.equal(w, e) for w, e in zip(weights, expected[0], strict=True))


def test_replicas_are_written_once(saved):
    """HSDP's copies, tied weights, and plain tensors that all ranks hold."""
    one = Manifest.read(saved(2)[0] / "step-00000003")
    hsdp = Manifest.read(saved(4, replicate=2)[0] / "step-00000003")
    assert (hsdp.world, hsdp.data_world, hsdp.mesh) == (4, 4, {"replicate": 2, "shard": 2})
    assert one.tensors == hsdp.tensors
    assert one.aliases == hsdp.aliases == {"model.head.weight": "model.embed.weight"}
    assert "model.ramp" not in {tensor.name for tensor in one.tensors}

    def num_entries(folder):
        metadata = FileSystemReader(folder).read_metadata()
        return len(metadata.storage_data)

    assert num_entries(saved(2)[0] / "step-00000003") == num_entries(
        saved(4, replicate=2)[0] / "step-00000003"
    )


def planned_body(ranks, folder):
    torch.manual_seed(0)
    model = shard(Net())
    Checkpointer(folder, model=model).save(1)
    return plan_of(model).digest()


def test_the_plan_is_kept_beside_the_checkpoint(tmp_path):
    digest, _ = run_ranks(planned_body, world=2, folder=tmp_path)
    assert Manifest.read(tmp_path / "step-00000001").plan_digest == digest
    assert Plan.load(tmp_path / "step-00000001" / "plan.json").digest() == digest


def gathered_body(ranks, folder, save):
    """Saved and resumed while units are still gathered after a forward: the shards count."""
    parts = build(ranks, seed=0 if save else 3)
    model, optimizer, scheduler = parts
    checkpointer = Checkpointer(folder, model=model, optimizer=optimizer, scheduler=scheduler)
    if save:
        train(*parts, range(2))
    before = dict(model.named_parameters())
    ids = torch.zeros(1, 1, dtype=torch.long)
    with torch.no_grad():
        model(ids)
    gathered = any(p is not before[name] for name, p in model.named_parameters())
    if save:
        checkpointer.save(2)
    else:
        assert checkpointer.resume() == 2
    with torch.no_grad():
        output = model(ids)
    return gathered, output, train(*parts, range(2, 4))


def test_while_units_are_gathered(tmp_path):
    (gathered, output, losses), _ = run_ranks(gathered_body, world=2, folder=tmp_path, save=True)
    assert gathered
    for gathered, other, resumed in run_ranks(gathered_body, world=2, folder=tmp_path, save=False):
        assert gathered
        assert torch.equal(output, other)
        assert resumed == losses


def share_body(ranks, folder):
    """The names of the files whose bytes this rank compared."""
    from shardfit.checkpoint import verify as module

    measured, measure = [], module.measure_file
    module.measure_file = lambda path, **kw: measured.append(path.name) or measure(path, **kw)
    try:
        load_checkpoint(folder, model=build(ranks)[0])
    finally:
        module.measure_file = measure
    return measured


def test_each_rank_verifies_a_share(saved):
    folder = saved(4)[0]
    shares = run_ranks(share_body, world=2, folder=folder)
    names = {file.name for file in Manifest.read(folder / "step-00000003").files}
    assert sorted(shares[0] + shares[1]) == sorted(names)
    assert all(len(share) == len(names) // 2 for share in shares)


def in_place_body(ranks, folder):
    """Going back inside a run: the optimizer's own tensors are filled, none is allocated twice."""
    parts = build(ranks)
    model, optimizer, scheduler = parts
    train(*parts, range(2))
    checkpointer = Checkpointer(folder, model=model, optimizer=optimizer, scheduler=scheduler)
    checkpointer.save(2)
    before = snapshot(*parts)
    addresses = {id(p): s["exp_avg"].to_local().data_ptr() for p, s in optimizer.state.items()}
    losses = train(*parts, range(2, 4))
    checkpointer.resume()
    assert_same(before, snapshot(*parts))
    now = {id(p): s["exp_avg"].to_local().data_ptr() for p, s in optimizer.state.items()}
    return addresses == now, losses, train(*parts, range(2, 4))


def test_back_within_a_run(tmp_path):
    for same_memory, losses, again in run_ranks(in_place_body, world=2, folder=tmp_path):
        assert same_memory
        assert losses == again
