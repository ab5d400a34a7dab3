"""Optimizers over sharded models: refusals, groups, and steps that are torch's own to rounding."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from ranks import run_ranks
from shardfit import ShardfitError
from shardfit.train.local_step import ELEMENTWISE
from shardfit.train.optimizer import build_optimizer, decay_matrices, find_unmoved


class Net(nn.Module):
    """Its norm has fewer rows than there are ranks, so that some shards are empty."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 8)
        self.inner = nn.Linear(8, 4)
        self.norm = nn.LayerNorm(1)
        self.head = nn.Linear(4, 6, bias=False)

    def forward(self, ids):
        hidden = self.inner(self.embed(ids))
        return self.head(hidden) * self.norm.weight + self.norm.bias


IDS = torch.tensor([[0, 1, 2], [3, 4, 5]])


def build(ranks=None):
    torch.manual_seed(0)
    model = Net()
    if ranks is not None:
        if "tensor" in (ranks.mesh.mesh_dim_names or ()):
            parallelize_module(model, ranks.mesh["tensor"], {"inner": ColwiseParallel(use_local_output=True)})
            model.head = nn.Linear(2, 6, bias=False)
        fully_shard(model, mesh=ranks.data_mesh)
    return model


def backward(model, scale=1.0):
    (model(IDS).square().mean() * scale).backward()


def train(model, optimizer, steps=3):
    for step in range(steps):
        backward(model, 1.0 + step)
        optimizer.step()
        optimizer.zero_grad()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in parameters.items()}


def options_of(cls):
    more = {torch.optim.SGD: {"momentum": 0.9}, torch.optim.RMSprop: {"momentum": 0.5, "centered": True}}
    adams = {torch.optim.Adam: {"amsgrad": True}, torch.optim.AdamW: {"weight_decay": 0.1}}
    return {"lr": 0.01, **more.get(cls, {}), **adams.get(cls, {})}


def in_name_order(classes):
    return sorted(classes, key=lambda cls: cls.__name__)


def every_class(ranks):
    results = {}
    for cls in in_name_order(ELEMENTWISE):
        model = build(ranks)
        optimizer = build_optimizer(model, cls, **options_of(cls))
        weights = train(model, optimizer)
        for param, state in optimizer.state.items():
            assert isinstance(param, DTensor)
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.ndim:
                    assert isinstance(value, DTensor), key
                    assert value.shape == param.shape
                    assert value.placements == param.placements
        assert [type(p) for g in optimizer.param_groups for p in g["params"]] == [
            type(p) for p in model.parameters()
        ]
        results[cls.__name__] = weights
    return results


@pytest.mark.parametrize(("world", "axes"), [(3, {}), (4, {"replicate": 2})])
def test_each_elementwise_class_steps_as_on_one_process(world, axes):
    by_rank = run_ranks(every_class, world=world, init=axes)
    for cls in in_name_order(ELEMENTWISE):
        model = build()
        expected = train(model, cls(model.parameters(), **options_of(cls)))
        for results in by_rank:
            for name, weight in results[cls.__name__].items():
                torch.testing.assert_close(
                    weight, expected[name], rtol=1e-4, atol=2e-6, msg=f"{cls.__name__} {name}"
                )


def with_tensor_axis(ranks):
    ours, theirs = (build(ranks) for _ in range(2))
    one = train(ours, build_optimizer(ours, lr=0.01))
    two = train(theirs, torch.optim.AdamW(theirs.parameters(), lr=0.01))
    return all(torch.allclose(one[name], two[name], rtol=1e-5, atol=1e-7) for name in one)


def test_tensor_parallel_parameters_step_as_dtensors_do():
    assert all(run_ranks(with_tensor_axis, world=4, init={"tensor": 2}))


def state_goes_everywhere(ranks):
    """get/set_optimizer_state_dict, state_dict, add_param_group, lr tensors, schedulers, closures."""
    model = build(ranks)
    optimizer = build_optimizer(model, lr=torch.tensor(0.01))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    train(model, optimizer, steps=2)
    scheduler.step()
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    raw = copy.deepcopy(optimizer.state_dict())
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    after = train(model, optimizer, steps=2)

    for restore in (
        lambda other: set_optimizer_state_dict(model, other, saved),
        lambda other: other.load_state_dict(copy.deepcopy(raw)),
    ):
        for name, p in model.named_parameters():
            p.data.copy_(weights[name])
        other = build_optimizer(model, lr=torch.tensor(0.5))
        restore(other)
        again = train(model, other, steps=2)
        assert all(torch.equal(after[name], again[name]) for name in after)

    calls = []
    optimizer.register_step_pre_hook(lambda o, *_: calls.append(o.param_groups[0]["params"][0]))
    optimizer.register_step_post_hook(lambda o, *_: calls.append(o.param_groups[0]["params"][0]))

    def closure():
        optimizer.zero_grad()
        loss = model(IDS).square().mean()
        loss.backward()
        return loss

    before = optimizer.param_groups[0]["params"][0].full_tensor()
    assert optimizer.step(closure) > 0
    assert not torch.equal(before, optimizer.param_groups[0]["params"][0].full_tensor())
    assert [isinstance(p, DTensor) for p in calls] == [True, True]

    extra = fully_shard(nn.Linear(3, 3), mesh=ranks.data_mesh)
    optimizer.add_param_group({"params": list(extra.parameters()), "lr": 0.1})
    extra(torch.ones(1, 3)).sum().backward()
    return find_unmoved(extra, optimizer.step)


def test_state_goes_where_torch_takes_it():
    assert run_ranks(state_goes_everywhere) == [[], []]


def raises_in_step(ranks):
    model = build(ranks)
    optimizer = build_optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    train(model, optimizer, steps=1)
    backward(model)
    optimizer.param_groups[0]["momentum"] = "not a number"
    with pytest.raises((TypeError, RuntimeError)):
        optimizer.step()
    held = [*optimizer.state, *(p for g in optimizer.param_groups for p in g["params"])]
    assert all(isinstance(p, DTensor) for p in held)
    optimizer.param_groups[0]["momentum"] = 0.9
    return find_unmoved(model, optimizer.step)


def test_a_step_that_raises_leaves_the_optimizer_whole():
    assert run_ranks(raises_in_step) == [[], []]


class Plain(torch.optim.SGD):
    """A subclass may do anything: it must get DTensors."""

    def step(self, closure=None):
        assert all(isinstance(p, DTensor) for g in self.param_groups for p in g["params"])
        return super().step(closure)


def moves_everything(ranks):
    names = []
    for cls, groups in [
        (torch.optim.AdamW, None),
        (Plain, [{"match": "*.bias", "lr": 0.5}, {}]),
        (torch.optim.AdamW, lambda name, p: {"weight_decay": 0.0} if p.ndim < 2 else {}),
    ]:
        model = build(ranks)
        model.embed.weight.requires_grad_(False)
        optimizer = build_optimizer(model, cls, lr=0.1, groups=groups)
        assert type(optimizer) is cls
        backward(model)
        names += find_unmoved(model, optimizer.step)
    frozen = build(ranks)
    optimizer = torch.optim.SGD([frozen.head.weight], lr=0.1)
    backward(frozen)
    return names, find_unmoved(frozen, optimizer.step)


def test_one_step_moves_every_trainable_parameter():
    for unmoved, left_out in run_ranks(moves_everything, world=3):
        assert unmoved == []
        assert set(left_out) == {n for n, _ in Net().named_parameters()} - {"head.weight"}


def sizes_of_groups(ranks):
    model = build(ranks)
    optimizer = build_optimizer(model, weight_decay=0.1, groups=decay_matrices(model))
    sizes = [(len(g["params"]), g["weight_decay"], g["fused"]) for g in optimizer.param_groups]
    by_hand = build_optimizer(model, torch.optim.AdamW, foreach=False).param_groups[0]
    patterns = build_optimizer(
        model, groups=[{"match": ["*.bias", "norm.*"], "lr": 0.5}, {"match": "[eih]*.weight"}]
    )
    return sizes, by_hand["fused"], [len(g["params"]) for g in patterns.param_groups]


def test_groups_by_rule():
    for sizes, by_hand, patterns in run_ranks(sizes_of_groups):
        assert sizes == [(2, 0.1, True), (4, 0.0, True)]  # inner, head; biases, norm, embedding
        assert not by_hand
        assert patterns == [3, 3]


def errors(ranks):
    messages = []

    def note(call):
        with pytest.raises(ShardfitError) as caught:
            call()
        messages.append(str(caught.value))

    with torch.device("meta"):
        meta = Net()
    plain = build()
    sharded = build(ranks)
    note(lambda: build_optimizer(plain))
    note(lambda: build_optimizer(meta))
    note(lambda: build_optimizer(sharded, torch.optim.LBFGS))
    note(lambda: build_optimizer(sharded, torch.optim.SparseAdam))
    note(lambda: build_optimizer(sharded, groups=[{"match": "h.*"}, {}]))
    note(lambda: build_optimizer(sharded, groups=[{"match": "*.bias"}]))
    note(lambda: build_optimizer(sharded, groups=[{"match": "*"}, {"match": "norm.*"}]))
    note(lambda: build_optimizer(sharded, groups=[{"params": list(plain.parameters())}]))
    note(lambda: build_optimizer(sharded, groups=lambda name, p: None))
    partly = build()
    fully_shard(partly.inner, mesh=ranks.data_mesh)
    note(lambda: build_optimizer(partly))
    return messages


def test_mistakes_are_named():
    expected = [
        ("SF501", "before the model is sharded"),
        ("SF501", "meta device"),
        ("SF521", "LBFGS"),
        ("SF330", "SparseAdam"),
        ("SF512", "h.*"),
        ("SF513", "embed.weight"),
        ("SF513", "norm.weight"),
        ("SF501", "6 of 6"),
        ("SF513", "embed.weight: None"),
        ("SF301", "embed.weight"),
    ]
    for messages in run_ranks(errors):
        assert len(messages) == len(expected)
        for message, (code, words) in zip(messages, expected, strict=True):
            assert message.startswith(code), message
            assert words in message


def built_while_gathered(ranks):
    model = build(ranks)
    with torch.no_grad():
        model(IDS)  # the root stays gathered
    optimizer = build_optimizer(model, lr=0.1)
    backward(model)
    return find_unmoved(model, optimizer.step)


def test_built_after_a_forward_without_backward():
    assert run_ranks(built_while_gathered) == [[], []]
