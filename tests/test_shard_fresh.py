"""Units that stay gathered never go stale, and nobody sees temporary tensors.

The same program with and without sharding: whatever comes between forward, backward and step.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch.distributed.tensor import DTensor

from model_zoo import LanguageModel, run
from ranks import run_ranks
from shardfit import Unit, plan_units, shard


def plain(p):
    return p.full_tensor() if isinstance(p, DTensor) else p


def eval_then_step(model, inputs, optimizer):
    """An accuracy forward between backward and step, and an evaluation after it."""
    run(model, inputs).backward()
    with torch.no_grad():
        run(model, inputs)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        return [run(model, inputs).item()]


def zero_grad_after_forward(model, inputs, optimizer):
    """Gradients cleared through the model, between forward and backward."""
    loss = run(model, inputs)
    model.zero_grad()
    loss.backward()
    optimizer.step()
    return [loss.item()]


def none_through_parameters(model, inputs, optimizer):
    loss = run(model, inputs)
    for p in model.parameters():
        p.grad = None
    loss.backward()
    optimizer.step()
    return [loss.item()]


def optimizer_after_evaluation(model, inputs, optimizer):
    """An optimizer made from the parameters as they are after a forward without gradients."""
    with torch.no_grad():
        run(model, inputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss = run(model, inputs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item()]


def forward_never_backwarded(model, inputs, optimizer):
    """A forward with gradients on, of which no backward follows."""
    run(model, inputs)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    return [run(model, inputs).item()]


def averaged_weights(model, inputs, optimizer):
    """Weights changed through .data after a forward without gradients, as averages are."""
    with torch.no_grad():
        before = run(model, inputs).item()
    for p in model.parameters():
        p.data.mul_(0.8)
    with torch.no_grad():
        return [before, run(model, inputs).item()]


def norm_after_evaluation(model, inputs, optimizer):
    run(model, inputs).backward()
    with torch.no_grad():
        run(model, inputs)
    total = sum(plain(p.grad).square().sum() for p in model.parameters()).sqrt().item()
    optimizer.step()
    optimizer.zero_grad()
    return [total]


def two_forwards_one_backward(model, inputs, optimizer):
    loss = run(model, inputs) + 2 * run(model, {"x": inputs["x"].flip(0)})
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item()]


def written_while_gathered(model, inputs, optimizer):
    """A write through model.parameters() between forward and backward reaches the weights."""
    loss = run(model, inputs)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01)
    del loss
    return [run(model, inputs).item()]


def evaluation_error(model, inputs, optimizer):
    """A forward that raises leaves the model fit for the next one."""
    with pytest.raises(IndexError), torch.no_grad():
        run(model, {"x": inputs["x"] + 1000})
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
    return eval_then_step(model, inputs, optimizer)


def inspected_from_hooks(model, inputs, optimizer):
    """Parameters listed while forward and backward run, and must stay gathered."""
    handle = model.layers[1].register_forward_hook(lambda *_: len(list(model.parameters())) and None)
    loss = run(model, inputs)
    loss.register_hook(lambda g: len(list(model.parameters())) and None)
    loss.backward()
    handle.remove()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item()]


PROGRAMS = (
    eval_then_step,
    zero_grad_after_forward,
    none_through_parameters,
    optimizer_after_evaluation,
    forward_never_backwarded,
    averaged_weights,
    norm_after_evaluation,
    two_forwards_one_backward,
    written_while_gathered,
    evaluation_error,
    inspected_from_hooks,
)


def same_programs(ranks, reshard, programs):
    """By program: the values that it gave on our model and on the plain one."""
    results = {}
    for program in programs:
        torch.manual_seed(0)
        model = LanguageModel(vocab=400, tied=reshard is None)
        inputs = {"x": torch.randint(0, 400, (4, 8))}
        alone = copy.deepcopy(model)
        plan = plan_units(model)
        if reshard is not None:
            # The root stays gathered, everything else is as given.
            units = [Unit(paths=u.paths, reshard=reshard) for u in plan.units[:-1]]
            plan = plan.replace(units=(*units, plan.units[-1]))
        shard(model, plan, ranks)
        ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, alone))
        pairs = []
        for _ in range(2):
            pairs += zip(program(model, inputs, ours), program(alone, inputs, theirs), strict=True)
        for (path, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            pairs.append((0.0, (plain(p) - q).abs().max().item()))
            assert isinstance(p, DTensor), (program.__name__, path)
        results[program.__name__] = pairs
    return results


@pytest.mark.parametrize(
    ("world", "reshard"),
    [(2, None), (2, False), (4, 2)],
    ids=["root kept", "all kept", "to groups"],
)
def test_same_program_same_result(world, reshard):
    programs = PROGRAMS if world == 2 else PROGRAMS[:7]
    for results in run_ranks(same_programs, world=world, reshard=reshard, programs=programs):
        for name, pairs in results.items():
            for ours, theirs in pairs:
                assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5), name


def gathers(ranks):
    """All-gathers of one training step."""
    from torch.distributed.fsdp import fully_shard
    from torch.profiler import ProfilerActivity, profile

    counts = []
    for by_hand in (True, False):
        torch.manual_seed(0)
        model = LanguageModel(vocab=400)
        if by_hand:
            for module in (model.embed, *model.layers):
                fully_shard(module, mesh=ranks.data_mesh)
            fully_shard([model.norm, model.head], mesh=ranks.data_mesh, reshard_after_forward=False)
            fully_shard(model, mesh=ranks.data_mesh)
        else:
            shard(model, None, ranks)
        x = {"x": torch.randint(0, 400, (2, 8))}
        run(model, x).backward()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            with profile(activities=[ProfilerActivity.CPU]) as trace:
                run(model, x).backward()
        counts.append(sum(e.count for e in trace.key_averages() if e.key.startswith("FSDP::all_gather (")))
    return counts


def test_a_training_step_gathers_no_more_than_one_by_hand():
    by_hand, ours = run_ranks(gathers)[0]
    assert 0 < ours < by_hand  # one less: the embedding's
