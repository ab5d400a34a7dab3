"""train_step: the gradient of the global mean, however its items are spread."""

from __future__ import annotations

import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ranks import run_ranks
from shardfit import ShardfitError
from shardfit.train.data import slice_batch
from shardfit.train.optimizer import build_optimizer
from shardfit.train.step import StepResult, sync_gradients, train_step

VOCAB = 11


def build(ranks=None):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    model = nn.Sequential(nn.Embedding(VOCAB, 8), inner, nn.Linear(8, VOCAB), nn.LayerNorm(VOCAB))
    if ranks is not None:
        fully_shard(model[1], mesh=ranks.data_mesh)
        fully_shard(model, mesh=ranks.data_mesh)
    return model


def batch_of(step, rows=6):
    """Targets with very different numbers that count by row and step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(VOCAB, (rows, 5), generator=generator)
    y = torch.randint(VOCAB, (rows, 5), generator=generator)
    for row in range(rows):
        y[row, : (row + step) % 5] = -100
    return x, y


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def weights_of(model):
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    return {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in tensors.items()}


def one_process(steps, num_micro, rows, max_norm=0.5):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    lines = []
    for step in range(steps):
        batches = [batch_of(10 * step + micro, rows) for micro in range(num_micro)]
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        loss = loss_of(model(x), y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        lines.append((loss.item(), int((y != -100).sum()), norm.item()))
    return lines, weights_of(model)


def many(ranks, steps, num_micro, rows, max_norm=0.5):
    model = build(ranks)
    optimizer = build_optimizer(model, lr=0.05)
    lines = []
    for step in range(steps):
        batches = [slice_batch(batch_of(10 * step + micro, rows), ranks) for micro in range(num_micro)]
        result = train_step(model, optimizer, batches, loss=loss_of, max_norm=max_norm)
        assert result.applied
        assert result.reason == ""
        lines.append((result.loss.item(), int(result.tokens), result.grad_norm.item()))
        assert f"{result.loss:.3f} {result.grad_norm:.3f}"
    assert all(p.grad is None for p in model.parameters())
    return lines, weights_of(model)


@pytest.mark.parametrize(
    ("world", "axes", "num_micro", "rows"),
    [(2, {}, 1, 6), (2, {}, 3, 7), (4, {"replicate": 2}, 2, 6), (4, {}, 2, 3), (4, {"tensor": 2}, 2, 5)],
)
def test_same_training_as_one_process(world, axes, num_micro, rows):
    expected, weights = one_process(3, num_micro, rows)
    for lines, mine in run_ranks(many, world=world, init=axes, steps=3, num_micro=num_micro, rows=rows):
        for ours, theirs in zip(lines, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=2e-5)
        for name in weights:
            torch.testing.assert_close(mine[name], weights[name], rtol=1e-3, atol=1e-4)


def traffic(ranks):
    model = build(ranks)
    optimizer = build_optimizer(model, lr=0.05)
    x, y = batch_of(1)
    reductions = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: reductions.append(1))
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as counted:
        train_step(model, optimizer, [(x, y)] * 4, loss=loss_of)
    return len(reductions), counted.call_count


def test_gradients_are_reduced_once_and_two_small_collectives_are_made():
    assert run_ranks(traffic) == [(7, 2), (7, 2)]


def interrupted(ranks):
    model = build(ranks)
    optimizer = build_optimizer(model, torch.optim.SGD, lr=0.05)
    calls = []

    def failing(logits, targets):
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("mine")
        return loss_of(logits, targets)

    with pytest.raises(KeyError):
        train_step(model, optimizer, [batch_of(1)] * 3, loss=failing)
    optimizer.zero_grad()
    loss_of(model(batch_of(2)[0]), batch_of(2)[1]).backward()
    return all(p.grad is not None for p in model.parameters())


def test_gradients_are_reduced_again_after_an_exception():
    assert run_ranks(interrupted) == [True, True]


def not_finite(ranks, cls):
    model = build(ranks)
    optimizer = build_optimizer(model, cls, lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    poison = float("nan") if ranks.rank == 1 else 1.0
    before = weights_of(model)
    first = train_step(
        model,
        optimizer,
        batch_of(1),
        loss=lambda o, t: loss_of(o, t) * poison,
        max_norm=1.0,
        scheduler=scheduler,
    )
    after = weights_of(model)
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert not optimizer.state
    second = train_step(model, optimizer, batch_of(1), loss=loss_of, scheduler=scheduler)
    finite = all(p.isfinite().all() for p in weights_of(model).values())
    return first.applied, first.reason, second.applied, bool(finite), scheduler.last_epoch


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.RMSprop])
def test_a_gradient_that_is_not_finite_is_skipped_by_all_ranks(cls):
    assert run_ranks(not_finite, cls=cls) == [(False, "the gradient's norm is nan", True, True, 2)] * 2


def scaled(ranks):
    """A scaler whose first scale overflows: the step is skipped, the scale falls, then it trains."""
    model = build(ranks)
    optimizer = build_optimizer(model, torch.optim.SGD, lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-120)
    results = []
    for _ in range(3):
        part = slice_batch(batch_of(1), ranks)
        result = train_step(model, optimizer, part, loss=loss_of, max_norm=0.5, scaler=scaler)
        results.append((result.applied, result.loss.item(), result.grad_norm.item()))
    return results, weights_of(model)


def test_scaler():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    norms = []
    for _ in range(2):
        loss_of(model(batch_of(1)[0]), batch_of(1)[1]).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    for results, weights in run_ranks(scaled):
        assert [applied for applied, _, _ in results] == [False, True, True]
        assert [norm for _, _, norm in results[1:]] == pytest.approx(norms, rel=1e-4)
        for name, weight in weights_of(model).items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-5)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x, labels=None):
        out = x @ self.weight
        return out if labels is None else ((out - labels).square().mean(), out)


def forms(ranks):
    model = fully_shard(TwoInputs(), mesh=ranks.data_mesh)
    optimizer = build_optimizer(model, torch.optim.SGD, lr=0.0)
    x, y = torch.arange(6.0).view(2, 3), torch.tensor([1.0, 2.0])
    losses = [
        train_step(model, optimizer, (x, y), loss=F.mse_loss),
        train_step(
            model, optimizer, [((x, y), None)], loss=lambda out, _: out[0], count=lambda i, _: len(i[1])
        ),
        train_step(
            model,
            optimizer,
            [({"x": x, "labels": y}, None)],
            loss=lambda out, _: out[0],
            count=lambda i, _: i["labels"].numel(),
        ),
    ]
    messages = []
    for wrong in (
        lambda: train_step(model, optimizer, [], loss=F.mse_loss),
        lambda: train_step(model, optimizer, [x], loss=F.mse_loss),
        lambda: train_step(model, optimizer, [(x, None)], loss=F.mse_loss),
        lambda: train_step(model, optimizer, [(x, y)], loss=lambda o, t: o - t),
        lambda: train_step(model, torch.optim.SGD([nn.Parameter(torch.ones(1))]), [(x, y)], loss=F.mse_loss),
        lambda: sync_gradients(nn.Linear(1, 1), True),
    ):
        with pytest.raises(ShardfitError) as caught:
            wrong()
        messages.append(str(caught.value).splitlines()[0])
    return [result.loss.item() for result in losses], [int(r.tokens) for r in losses], messages


def test_forms_of_micro_batches_and_mistakes():
    for losses, tokens, messages in run_ranks(forms):
        assert losses == pytest.approx([52.0] * 3)
        assert tokens == [4] * 3
        expected = ["no micro-batch", "pair of inputs", "SF509", "one number", "SF501", "isn't sharded"]
        assert len(messages) == len(expected)
        assert all(words in message for words, message in zip(expected, messages, strict=True)), messages


def own_loop(ranks):
    """The pieces alone, in a script's own loop."""
    from shardfit.train.clip import clip_grad_norm_

    model = build(ranks)
    optimizer = build_optimizer(model, lr=0.05)
    for step in range(3):
        for micro in range(2):
            sync_gradients(model, micro == 1)
            (x, _), weight = slice_batch(batch_of(10 * step + micro), ranks)
            (model(x).square().mean() * weight / 2).backward()
            assert (next(model.parameters()).grad is None) == (micro == 0)
        clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def test_pieces_in_a_loop_of_ones_own():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(3):
        for micro in range(2):
            (model(batch_of(10 * step + micro)[0]).square().mean() / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for mine in run_ranks(own_loop):
        for name, weight in weights_of(model).items():
            torch.testing.assert_close(mine[name], weight, rtol=1e-3, atol=1e-4)


def test_a_result_reads_as_numbers():
    result = StepResult(loss=torch.tensor(1.5), tokens=torch.tensor(3), grad_norm=torch.tensor(float("inf")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (f"{result.loss:.1f}", result.applied) == ("1.5", False)
    assert "inf" in result.reason
