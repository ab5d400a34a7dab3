"""Comparing recordings, on records made by hand: what is joined, what is told apart, where it begins."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from shardfit.parity.causes import name_resume_causes
from shardfit.parity.compare import compare, find_drift, relative, step_losses, step_norms, tensor_norms
from shardfit.parity.doubts import doubts_of, name_recorder_failure
from shardfit.parity.recording import Part, RankRecord, Recording, Step
from shardfit.parity.tolerance import tolerance_for


def part(name, *, rows=(0, 4), shape=(4, 2), spread="sharded", dtype="float32"):
    extent = (rows[1] - rows[0], *shape[1:])
    offset = (rows[0], *[0] * (len(shape) - 1))
    return Part(name=name, shape=shape, dtype=dtype, spread=spread, offset=offset, extent=extent)


def step(index, losses, squares, *, lr=0.1, weights=None):
    return Step(index=index, losses=losses, squares=squares, lr=(lr,), weights=weights or {})


def rank(number, world, steps, parts, *, first_step=0):
    return RankRecord(
        script="s.py",
        argv=(),
        rank=number,
        world=world,
        data_rank=number,
        data_world=world,
        torch_version="2",
        device="cpu",
        ended="stopped",
        first_step=first_step,
        steps=tuple(steps),
        parts=tuple(parts),
    )


def single(values, *, first_step=0, lr=0.1, folder="", norms=None):
    norms = norms or [4.0] * len(values)
    steps = [
        step(i, (v,), {"w": n * n / 2, "b": n * n / 2}, lr=lr)
        for i, (v, n) in enumerate(zip(values, norms, strict=True))
    ]
    parts = [part("w"), part("b", shape=(4,))]
    return Recording(folder=folder, ranks=(rank(0, 1, steps, parts, first_step=first_step),))


def double(left, right, *, weights=({}, {}), folder=""):
    """Two ranks: "w" halved, "b" on both."""
    ranks = []
    for number, values in enumerate((left, right)):
        steps = [step(i, v, {"w": 4.0, "b": 8.0}, weights=weights[number]) for i, v in enumerate(values)]
        parts = [part("w", rows=(2 * number, 2 * number + 2)), part("b", shape=(4,), spread="whole")]
        ranks.append(rank(number, 2, steps, parts))
    return Recording(folder=folder, ranks=tuple(ranks))


def test_losses_are_sums_of_micro_batches_and_means_of_ranks():
    assert step_losses(double([(1.0, 2.0)], [(3.0, 4.0)])) == [5.0]


def test_norms_join_parts_and_count_copies_once():
    run = double([(1.0,)], [(1.0,)])
    assert tensor_norms(run) == [{"w": math.sqrt(8.0), "b": math.sqrt(8.0)}]
    assert step_norms(run) == [4.0]


def test_the_same():
    comparison = compare(single([2.0, 1.0]), double([(1.5,), (0.5,)], [(2.5,), (1.5,)]))
    assert comparison.agrees
    assert (comparison.first, comparison.num_steps, comparison.first_step) == (0, 2, None)
    assert comparison.quantity("gradient norm").original == (4.0, 4.0)


def test_the_first_step_that_differs_and_by_how_much():
    comparison = compare(single([4.0, 3.0, 2.0]), single([4.0, 3.0 + 3e-5, 2.5]))
    loss = comparison.quantity("loss")
    assert not comparison.agrees
    assert comparison.first_step == loss.first_step == 1
    assert (loss.at_step, loss.largest) == (2, pytest.approx(0.2))


def test_the_first_tensor_that_differs():
    theirs, ours = single([1.0, 1.0]), single([1.0, 1.0])
    steps = list(ours.ranks[0].steps)
    steps[1] = dataclasses.replace(steps[1], squares={"w": 8.0, "b": 9.0})
    ours = Recording(folder="", ranks=(dataclasses.replace(ours.ranks[0], steps=tuple(steps)),))
    comparison = compare(theirs, ours)
    assert (comparison.first_tensor, comparison.first_step) == ("b", 1)


def test_a_gradient_of_noise_is_no_evidence():
    """Small against the whole gradient, though twice the other's."""
    theirs, ours = single([1.0]), single([1.0])
    for run, tiny in ((theirs, 1e-18), (ours, 4e-18)):
        run.ranks[0].steps[0].squares["tiny"] = tiny
    assert compare(theirs, ours).first_tensor is None


def test_a_resumed_run_is_compared_with_the_same_steps():
    comparison = compare(single([4.0, 3.0, 2.0, 1.0]), single([2.0, 1.0], first_step=2))
    assert comparison.agrees
    assert (comparison.first, comparison.num_steps) == (2, 2)
    late = compare(single([4.0, 3.0, 2.0, 1.0]), single([2.0, 9.0], first_step=2))
    assert late.first_step == 3


def test_no_steps_agree_with_nothing():
    comparison = compare(single([1.0]), single([], first_step=1))
    assert comparison.num_steps == 0
    assert not comparison.agrees


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_none(bad):
    assert not compare(single([1.0, 1.0]), single([1.0, bad])).agrees
    assert compare(single([1.0, bad]), single([1.0, bad])).agrees
    assert relative(1.0, bad) == math.inf


def test_learning_rates():
    comparison = compare(single([1.0], lr=0.1), single([1.0], lr=0.1001))
    assert comparison.first_step == 0
    assert [q.name for q in comparison.quantities if not q.agrees] == ["learning rate"]


def test_names_that_only_one_has():
    ours = single([1.0])
    renamed = dataclasses.replace(ours.ranks[0], parts=(part("w"), part("c", shape=(4,))))
    comparison = compare(single([1.0]), Recording(folder="", ranks=(renamed,)))
    assert (comparison.missing, comparison.unexpected) == (("b",), ("c",))
    assert not comparison.agrees


def test_copies_that_drift():
    same = double([(1.0,)], [(1.0,)], weights=({"b": "x"}, {"b": "x"}))
    apart = double([(1.0,)], [(1.0,)], weights=({"b": "x"}, {"b": "y"}))
    assert find_drift(same) == ()
    assert find_drift(apart) == ("b",)
    assert not compare(single([1.0]), apart).agrees


def written(folder, run, tensors):
    folder.mkdir()
    for number, values in enumerate(tensors):
        torch.save(values, folder / f"weights-{number}.pt")
    return dataclasses.replace(run, folder=str(folder))


def test_final_weights_are_joined_from_their_parts(tmp_path):
    w, b = torch.arange(8.0).view(4, 2), torch.ones(4)
    theirs = written(tmp_path / "a", single([1.0]), [{"w": w, "b": b}])
    ours = written(
        tmp_path / "b", double([(1.0,)], [(1.0,)]), [{"w": w[:2], "b": b}, {"w": w[2:] + 0.5, "b": b}]
    )
    comparison = compare(theirs, ours)
    assert [(x.name, x.absolute) for x in comparison.weights] == [("w", 0.5), ("b", 0.0)]
    assert not comparison.agrees
    assert comparison.first_tensor == "w"
    assert compare(theirs, ours, weights=False).agrees


def test_weights_after_other_steps_are_not_compared(tmp_path):
    theirs = written(tmp_path / "a", single([1.0, 1.0]), [{"w": torch.ones(4, 2)}])
    ours = written(tmp_path / "b", single([1.0]), [{"w": torch.zeros(4, 2)}])
    assert compare(theirs, ours).weights == ()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_wrong_factor_differs_in_any_dtype(dtype, factor):
    """Of the loss, and of the gradient alone."""

    def run(loss, norm):
        made = single([loss, loss], norms=[norm, norm])
        facts = {"fsdp_units": [{"param_dtype": dtype}]}
        return Recording(folder="", ranks=(dataclasses.replace(made.ranks[0], facts=facts),))

    assert compare(single([1.0, 1.0]), run(1.0, 4.0)).agrees
    assert compare(single([1.0, 1.0]), run(factor, 4.0)).first_step == 0
    assert compare(single([1.0, 1.0]), run(1.0, 4.0 * factor)).first_step == 0


def test_a_resume_that_leaves_nothing_to_compare_is_said():
    resumed = single([], first_step=1)
    comparison = compare(single([1.0]), resumed)
    [finding] = name_resume_causes(single([1.0]), single([1.0]), resumed, comparison)
    assert finding.code == "SF630"
    assert "no step to compare" in finding.evidence


def test_weights_alone_are_no_evidence_of_a_lost_optimizer_state(tmp_path):
    theirs = written(tmp_path / "a", single([1.0, 1.0]), [{"w": torch.ones(4, 2)}])
    resumed = written(tmp_path / "b", single([1.0], first_step=1), [{"w": torch.zeros(4, 2)}])
    comparison = compare(theirs, resumed)
    [finding] = name_resume_causes(theirs, theirs, resumed, comparison)
    assert finding.code == "SF630"
    assert "final w" in finding.evidence


def test_tolerance_follows_the_least_precise_dtype_and_the_rates():
    fp32 = tolerance_for(single([1.0]), single([1.0]))
    run = single([1.0])
    low = dataclasses.replace(run.ranks[0], facts={"fsdp_units": [{"param_dtype": "bfloat16"}]})
    bf16 = tolerance_for(single([1.0]), Recording(folder="", ranks=(low,)))
    assert bf16.loss > 1000 * fp32.loss
    assert fp32.dtype == "float32"
    longer = tolerance_for(single([1.0] * 10), single([1.0] * 10))
    assert longer.weight(1.0) > 9 * fp32.weight(1.0)
    given = tolerance_for(single([1.0]), single([1.0]), rtol=0.5)
    assert (given.loss, given.gradient) == (0.5, 0.5)
    assert all(sentence for sentence in given.sentences)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"draws": "own", "draws_why": "inputs differ"}, "inputs differ"),
        ({"exchange_broken": "rank 1 did not come"}, "rank 1 did not come"),
        ({"saved_outside": ["/elsewhere/a.pt"]}, "/elsewhere/a.pt"),
    ],
)
def test_doubts_are_said(facts, words):
    run = double([(1.0,)], [(1.0,)])
    assert doubts_of("candidate", run) == []
    doubtful = dataclasses.replace(run, ranks=(run.ranks[0], dataclasses.replace(run.ranks[1], facts=facts)))
    [sentence] = doubts_of("candidate", doubtful)
    assert words in sentence


def test_a_failure_of_the_recorder_is_never_clean():
    run = double([(1.0,)], [(1.0,)])
    assert name_recorder_failure("candidate", run) is None
    failed = dataclasses.replace(run.ranks[1], facts={"recorder_error": "KeyError: 3"})
    finding = name_recorder_failure("candidate", dataclasses.replace(run, ranks=(run.ranks[0], failed)))
    assert finding.severity == "error"
    assert "KeyError: 3" in finding.evidence
