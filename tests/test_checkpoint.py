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
    save_checkpoint,
    shard,
)
from shardfit.train.optimizer import build_optimizer, decay_matrices

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


# ---- one process: every part of the training state


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


class Warm:
    """A schedule with state of its own, which LambdaLR saves."""

    def __init__(self, length):
        self.length = length

    def __call__(self, step):
        return min(1.0, (step + 1) / self.length)


lrs = torch.optim.lr_scheduler
SCHEDULERS = {
    "LambdaLR": lambda o, new: lrs.LambdaLR(o, Warm(99 if new else 4)),
    "LambdaLR of a function": lambda o, new: lrs.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o, new: lrs.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o, new: lrs.StepLR(o, 2),
    "MultiStepLR": lambda o, new: lrs.MultiStepLR(o, [2, 4, 4, 5]),
    "ConstantLR": lambda o, new: lrs.ConstantLR(o, total_iters=4),
    "LinearLR": lambda o, new: lrs.LinearLR(o),
    "ExponentialLR": lambda o, new: lrs.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o, new: lrs.PolynomialLR(o, 9),
    "CosineAnnealingLR": lambda o, new: lrs.CosineAnnealingLR(o, 7),
    "CosineAnnealingWarmRestarts": lambda o, new: lrs.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR": lambda o, new: lrs.CyclicLR(o, 0.01, 0.1, 3, mode="triangular2"),
    "OneCycleLR": lambda o, new: lrs.OneCycleLR(o, 0.2, total_steps=20),
    "SequentialLR": lambda o, new: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=3), lrs.CosineAnnealingLR(o, 9)], [3]
    ),
    "ChainedScheduler": lambda o, new: lrs.ChainedScheduler([lrs.LinearLR(o, 0.1), lrs.StepLR(o, 2)], o),
    "ReduceLROnPlateau": lambda o, new: lrs.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on(name, tmp_path):
    def go(scheduler, optimizer, num_steps):
        rates = []
        for _ in range(num_steps):
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            rates.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0].get("momentum")))
        return rates

    model, optimizer = tiny(torch.optim.SGD, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer, False)
    go(scheduler, optimizer, 4)
    Checkpointer(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler).save(4)
    expected = go(scheduler, optimizer, 6)
    model, optimizer = tiny(torch.optim.SGD, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer, True)
    Checkpointer(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler).resume()
    assert go(scheduler, optimizer, 6) == expected


def test_saving_changes_nothing(tmp_path):
    """No step is taken to fill an empty optimizer, no gradient is dropped, nothing is drawn."""
    model, optimizer = tiny()
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    for step, pending in enumerate((False, True)):
        if pending:
            advance(model, optimizer, 1)
            model(torch.ones(1, 3)).sum().backward()
        weights = [p.clone() for p in model.parameters()]
        grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        num_states, drawn, num_steps = len(optimizer.state), torch.get_rng_state(), len(steps)
        Checkpointer(tmp_path, model=model, optimizer=optimizer).save(step)
        assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
        for param, grad in zip(model.parameters(), grads, strict=True):
            assert (param.grad is None) == (grad is None)
            assert grad is None or torch.equal(param.grad, grad)
        assert len(optimizer.state) == num_states == (4 if pending else 0)
        assert torch.equal(torch.get_rng_state(), drawn)
        assert len(steps) == num_steps


def test_back_to_before_the_first_update(tmp_path):
    """An optimizer without state gets none, also where it has some now."""
    model, optimizer = tiny()
    checkpointer = Checkpointer(tmp_path, model=model, optimizer=optimizer)
    checkpointer.save(0)
    advance(model, optimizer, 2)
    expected = [p.clone() for p in model.parameters()]
    checkpointer.resume(0)
    assert not optimizer.state
    advance(model, optimizer, 2)
    assert all(torch.equal(p, e) for p, e in zip(model.parameters(), expected, strict=True))


def test_hyper_parameters_as_the_script_holds_them(tmp_path):
    """lr comes back; how it is held (a tensor), and how the step is computed, stay the script's."""
    model, optimizer = tiny(fused=True)
    advance(model, optimizer, 2)
    optimizer.param_groups[0]["lr"] = 0.025
    Checkpointer(tmp_path, model=model, optimizer=optimizer).save(2)
    model, optimizer = tiny(lr=torch.tensor(0.5), foreach=False, capturable=False)
    rate = optimizer.param_groups[0]["lr"]
    Checkpointer(tmp_path, model=model, optimizer=optimizer).resume()
    (group,) = optimizer.param_groups
    assert isinstance(group["lr"], torch.Tensor)
    assert group["lr"].item() == pytest.approx(0.025)
    assert rate.dtype == group["lr"].dtype
    assert (group["fused"], group["foreach"]) == (None, False)
    assert {state["step"].item() for state in optimizer.state.values()} == {2.0}


def test_several_optimizers_and_schedulers(tmp_path):
    def make(order=1):
        torch.manual_seed(order)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        optimizers = [
            torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW(model[1].parameters(), lr=0.2),
        ]
        return model, optimizers, [lrs.StepLR(optimizer, 1) for optimizer in optimizers]

    def go(model, optimizers, schedulers):
        for number in range(3):
            model(torch.full((2, 3), float(number))).square().mean().backward()
            for part in (*optimizers, *schedulers):
                part.step()
            model.zero_grad()
        return [p.clone() for p in model.parameters()]

    parts = make()
    go(*parts)
    Checkpointer(tmp_path, model=parts[0], optimizer=parts[1], scheduler=parts[2]).save(3)
    expected = go(*parts)
    parts = make(order=2)
    Checkpointer(tmp_path, model=parts[0], optimizer=parts[1], scheduler=parts[2]).resume()
    assert all(torch.equal(p, e) for p, e in zip(go(*parts), expected, strict=True))


def test_scaler_and_extra(tmp_path):
    model, optimizer = tiny()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    scaler.step(optimizer)
    scaler.update(4.0)
    extra = {"best": 0.5, "history": [1, (2, 3)], "mean": torch.arange(3.0), "ema": nn.Linear(2, 2)}
    Checkpointer(tmp_path, model=model, optimizer=optimizer, scaler=scaler, extra=extra).save(1)
    fresh = {"best": None, "history": [], "mean": torch.zeros(3), "ema": nn.Linear(2, 2)}
    model, optimizer = tiny()
    other = torch.amp.GradScaler("cpu")
    Checkpointer(tmp_path, model=model, optimizer=optimizer, scaler=other, extra=fresh).resume()
    assert other.get_scale() == 4.0
    assert fresh["best"] == 0.5
    assert fresh["history"] == [1, (2, 3)]
    assert torch.equal(fresh["mean"], torch.arange(3.0))
    assert torch.equal(fresh["ema"].weight, extra["ema"].weight)


class Odd(nn.Module):
    """What models have besides parameters in float32."""

    def __init__(self, value):
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(value))
        self.bf16 = nn.Parameter(torch.full((2, 3), value, dtype=torch.bfloat16).t())
        self.none = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("count", torch.tensor(int(value)))
        self.register_buffer("mask", torch.tensor([value > 1, False]))
        self.register_buffer("wave", torch.full((2,), value * 1j))
        self.register_buffer("absent", None)
        self.extra = {"value": value, "table": torch.full((2,), value)}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_odd_tensors_and_extra_state(tmp_path):
    one, two = Odd(1.0), Odd(2.0)
    Checkpointer(tmp_path, model=one).save(1)
    Checkpointer(tmp_path, model=two).resume()
    assert_same(one.state_dict(), two.state_dict())
    assert two.extra["value"] == 1.0
    assert torch.equal(two.extra["table"], torch.ones(2))


def test_state_kept_in_another_dtype_than_the_parameters(tmp_path):
    """float32 moments of bfloat16 parameters, which torch's load_state_dict would round."""
    model = nn.Linear(3, 2).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        optimizer.state[param]["momentum_buffer"] = torch.full(param.shape, 1 / 3)
    Checkpointer(tmp_path, model=model, optimizer=optimizer).save(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    Checkpointer(tmp_path, model=model, optimizer=optimizer).resume()
    for param in model.parameters():
        assert torch.equal(optimizer.state[param]["momentum_buffer"], torch.full(param.shape, 1 / 3))


class Counting(torch.optim.SGD):
    """State that belongs to no parameter, and a state_dict with something of its own."""

    def step(self, closure=None):
        super().step(closure)
        self.state["all"]["count"] = self.state["all"].get("count", 0) + 1
        self.state["all"]["mean"] = torch.full((3,), float(self.state["all"]["count"]))

    def state_dict(self):
        return {**super().state_dict(), "mode": "warm" if self.state["all"] else "cold"}

    def load_state_dict(self, state):
        self.mode = state["mode"]
        super().load_state_dict(state)


def test_state_of_no_parameter(tmp_path):
    model, optimizer = tiny(Counting)
    advance(model, optimizer, 3)
    Checkpointer(tmp_path, model=model, optimizer=optimizer).save(3)
    model, optimizer = tiny(Counting)
    Checkpointer(tmp_path, model=model, optimizer=optimizer).resume()
    assert optimizer.mode == "warm"
    assert optimizer.state["all"]["count"] == 3
    assert torch.equal(optimizer.state["all"]["mean"], torch.full((3,), 3.0))


def test_wrappers_leave_no_trace_in_the_names(tmp_path):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def wrapped():
        model, optimizer = tiny()
        model[0] = checkpoint_wrapper(model[0])
        model[1] = torch.compile(model[1], backend="eager")
        return torch.compile(model, backend="eager"), optimizer

    plain, optimizer = tiny()
    advance(plain, optimizer, 2)
    Checkpointer(tmp_path, model=plain, optimizer=optimizer).save(2)
    advance(plain, optimizer, 1, offset=2)
    other, optimizer = wrapped()
    checkpointer = Checkpointer(tmp_path, model=other, optimizer=optimizer)
    checkpointer.resume()
    advance(other, optimizer, 1, offset=2)
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), other.parameters(), strict=True))
    checkpointer.save(3)
    plain, optimizer = tiny()
    assert load_checkpoint(tmp_path, model=plain, optimizer=optimizer) == 3
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), other.parameters(), strict=True))


def test_random_state_goes_on(tmp_path):
    def draw():
        return random.random(), np.random.rand(), torch.rand(2).tolist()

    draw()
    Checkpointer(tmp_path, model=nn.Linear(1, 1)).save(1)
    expected = draw()
    for seeder in (random.seed, np.random.seed, torch.manual_seed):
        seeder(123)
    Checkpointer(tmp_path, model=nn.Linear(1, 1)).resume()
    assert draw() == expected


# ---- the folder over time


def folder_names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_retention_and_order(tmp_path):
    model = nn.Linear(1, 1)
    checkpointer = Checkpointer(tmp_path, model=model, keep=2, keep_every=100)
    for step in (1, 9, 10, 100, 101, 99_999_999, 100_000_000):
        model.weight.data.fill_(step)
        checkpointer.save(step)
        assert checkpointer.latest() == step
    assert checkpointer.steps() == [100, 99_999_999, 100_000_000]
    fresh = nn.Linear(1, 1)
    assert load_checkpoint(tmp_path, model=fresh) == 100_000_000
    assert fresh.weight.item() == 100_000_000
    assert load_checkpoint(tmp_path, 100, model=fresh) == 100
    assert fresh.weight.item() == 100


def test_a_step_saved_twice(tmp_path):
    model = nn.Linear(1, 1)
    checkpointer = Checkpointer(tmp_path, model=model)
    for value in (1.0, 2.0, 3.0):
        model.weight.data.fill_(value)
        checkpointer.save(7)
    assert checkpointer.steps() == [7]
    assert load_checkpoint(tmp_path, model=(fresh := nn.Linear(1, 1))) == 7
    assert fresh.weight.item() == 3.0


def test_back_to_an_earlier_step_and_on(tmp_path):
    """What is saved after going back is the newest, though its step is less."""
    model = nn.Linear(1, 1)
    checkpointer = Checkpointer(tmp_path, model=model, keep=3)
    for step in (100, 200, 300):
        model.weight.data.fill_(step)
        checkpointer.save(step)
    assert checkpointer.resume(100) == 100
    assert checkpointer.latest() == 300
    model.weight.data.fill_(-150)
    checkpointer.save(150)
    assert checkpointer.latest() == 150
    assert folder_names(tmp_path) == ["step-00000150.1", "step-00000200", "step-00000300"]
    assert load_checkpoint(tmp_path, model=model) == 150
    assert model.weight.item() == -150
    checkpointer.save(200)
    assert folder_names(tmp_path) == ["step-00000150.1", "step-00000200.1", "step-00000300"]


def test_thin_functions(tmp_path):
    model, optimizer = tiny()
    save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer, keep=1)
    save_checkpoint(tmp_path, 2, model=model, optimizer=optimizer, keep=1)
    assert load_checkpoint(tmp_path, model=model, optimizer=optimizer) == 2
    assert folder_names(tmp_path) == ["step-00000002"]


# ---- several ranks


OPTIMIZERS = {
    "SGD": {},
    "SGD with momentum": {"momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {"fused": True},
    "Adagrad": {},
    "RMSprop": {"momentum": 0.1, "centered": True},
    "NAdam": {},
    "Adamax": {},
}


def optimizers_body(ranks, folder, save):
    """Train with each optimizer, save (or resume) on the way; the losses that follow."""
    losses = {}
    for name, options in OPTIMIZERS.items():
        cls = getattr(torch.optim, name.split()[0])
        parts = build(ranks, cls=cls, seed=0 if save else 3, lr=0.01, **options)
        model, optimizer, scheduler = parts
        checkpointer = Checkpointer(folder / name, model=model, optimizer=optimizer, scheduler=scheduler)
        if save:
            train(*parts, range(2))
            checkpointer.save(2)
        else:
            assert checkpointer.resume() == 2
        losses[name] = train(*parts, range(2, 4))
    return losses


def test_optimizers_at_another_world_size(tmp_path):
    expected = run_ranks(optimizers_body, world=2, folder=tmp_path, save=True)[0]
    for results in (
        run_ranks(optimizers_body, world=4, folder=tmp_path, save=False)[0],
        optimizers_body(None, tmp_path, save=False),
    ):
        assert results.keys() == expected.keys()
        for name, losses in results.items():
            assert losses == pytest.approx(expected[name], rel=2e-5), name


def built_body(ranks, folder, save, options):
    """The library's own pieces: shard, build_optimizer, train_step's clipping."""
    torch.manual_seed(0 if save else 3)
    model = shard(Net(), ranks=ranks)
    optimizer = build_optimizer(model, lr=0.05, groups=decay_matrices(model), **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    parts = model, optimizer, scheduler
    checkpointer = Checkpointer(folder, model=model, optimizer=optimizer, scheduler=scheduler)
    if save:
        train(*parts, range(2))
        checkpointer.save(2)
    else:
        assert checkpointer.resume() == 2
    before = snapshot(*parts)
    return before, train(*parts, range(2, 4))


@pytest.mark.parametrize("options", [{}, {"fused": False}], ids=["fused", "for each"])
def test_the_library_s_own_optimizer(options, tmp_path):
    before, losses = run_ranks(built_body, world=2, folder=tmp_path, save=True, options=options)[0]
    for world in (2, 4):
        for after, resumed in run_ranks(
            built_body, world=world, folder=tmp_path, save=False, options=options
        ):
            assert_same(before, after)
            assert resumed == pytest.approx(losses, rel=1e-5)


class Rows(torch.optim.Optimizer):
    """Keeps a mean for each row of a parameter: state of another shape, sharded its own way."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                rows = param.grad.reshape(param.shape[0], -1).square().mean(dim=1)
                state["rows"] = 0.9 * state["rows"] + rows if "rows" in state else rows
                state["history"] = {"sum": [rows.sum(), 1], 3: 4}
                param.sub_(param.grad, alpha=group["lr"])


def rows_body(ranks, folder, save):
    parts = build(ranks, cls=Rows, seed=0 if save else 3, lr=0.01)
    model, optimizer, scheduler = parts
    checkpointer = Checkpointer(folder, model=model, optimizer=optimizer, scheduler=scheduler)
    if save:
        train(*parts, range(2))
        checkpointer.save(2)
    else:
        checkpointer.resume()
    state = optimizer.state[model.embed.weight]
    assert state["history"][3] == 4
    before = whole(state["rows"]), whole(state["history"]["sum"][0])
    train(*parts, range(2, 3))
    return *before, whole(optimizer.state[model.embed.weight]["rows"])


def test_state_of_another_shape_than_its_parameter(tmp_path):
    expected = run_ranks(rows_body, world=2, folder=tmp_path, save=True)[0]
    for result in (
        *run_ranks(rows_body, world=4, folder=tmp_path, save=False),
        rows_body(None, tmp_path, save=False),
    ):
        for value, other in zip(result, expected, strict=True):
            torch.testing.assert_close(value, other)


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
