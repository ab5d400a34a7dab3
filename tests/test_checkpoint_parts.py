"""Checkpointer: every part of the training state, in one process; and the folder over time."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from shardfit import (
    Checkpointer,
    load_checkpoint,
    save_checkpoint,
)
from test_checkpoint import advance, assert_same, tiny


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


def test_ties_whose_first_name_has_changed(tmp_path):
    def tied(names):
        torch.manual_seed(len(names[0]))
        model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in names})
        model[names[1]].weight = model[names[0]].weight
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer

    model, optimizer = tied(("embed", "out"))
    step_all(model, optimizer)
    Checkpointer(tmp_path, model=model, optimizer=optimizer).save(1)
    other, fresh = tied(("out", "embed"))
    Checkpointer(tmp_path, model=other, optimizer=fresh).resume()
    assert torch.equal(other["embed"].weight, model["embed"].weight)
    assert other["out"].weight is other["embed"].weight
    (state,), (state_now,) = optimizer.state.values(), fresh.state.values()
    assert_same(dict(state), dict(state_now))


def step_all(model, optimizer):
    for number, param in enumerate(model.parameters()):
        param.grad = torch.full_like(param, number + 0.5)
    optimizer.step()


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
