"""Why a candidate trains differently: causes that the evidence shows, each with its code. No torch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from shardfit.findings import Finding, Where
from shardfit.parity.compare import Comparison, Quantity, relative, step_losses, step_norms
from shardfit.parity.recording import RankRecord, Recording
from shardfit.rules import RULES

# How near a ratio must be to a whole factor to be that factor: far from noise, nearer than data.
_FACTOR_TOLERANCE = 5e-3
_LOW = ("bfloat16", "float16")


def name_causes(original: Recording, candidate: Recording, comparison: Comparison) -> tuple[Finding, ...]:
    """Findings on a candidate that ran from its start.

    Facts about live objects come first; then what the numbers show. Where something differs and
    no cause is recognised, one finding says what, where first, and what was ruled out (SF630).
    """
    failed = name_failure(candidate)
    found = [
        finding
        for name in (_stale_optimizer, _forward_direct, _unsynced, _drifting, _low_reduction)
        if (finding := name(candidate, comparison)) is not None
    ]
    if failed is not None:
        # A cause that shows on live objects says more than where it ended in an error.
        error = "; ".join(rank.error for rank in candidate.ranks if rank.error)
        return tuple(
            dataclasses.replace(finding, evidence=f"{finding.evidence}; it ended with {error}")
            for finding in found
        ) or (failed,)
    found += [
        finding
        for judge in (_left_out, _evaluation_mode, _same_rows)
        if (finding := judge(original, candidate)) is not None
    ]
    if not comparison.agrees and not any(f.severity == "error" for f in found):
        found.append(_by_factor(original, candidate, comparison) or _unexplained(candidate, comparison))
    return tuple(found)


def name_resume_causes(
    original: Recording, candidate: Recording, resumed: Recording, comparison: Comparison
) -> tuple[Finding, ...]:
    """Findings on a candidate that was stopped and started again, compared with the original's same steps."""
    if failed := name_failure(resumed):
        return (failed,)
    if comparison.agrees:
        return ()
    if comparison.num_steps == 0:
        return (_unexplained(resumed, comparison),)
    begin = resumed.ranks[0].first_step
    where = Where(step=begin)
    ranks = len(resumed.ranks)
    losses, rates = comparison.quantity("loss"), comparison.quantity("learning rate")
    loss = losses.candidate[0] if losses.candidate else float("nan")
    start = step_losses(original)[0]
    reads = [read for rank in resumed.ranks for read in rank.facts.get("reads") or []]
    if relative(loss, start) <= losses.tolerance and relative(loss, losses.original[0]) > losses.tolerance:
        return (
            RULES["SF632"].finding(
                evidence=f"on {ranks} ranks the first loss after the resume is {loss:.6g}, that of step 0; "
                f"step {begin} has {losses.original[0]:.6g}; checkpoints read: {len(reads)}",
                where=where,
            ),
        )
    found = []
    if not rates.agrees:
        at = (rates.first_step or begin) - begin
        found.append(
            RULES["SF708"].finding(
                evidence=f"at step {begin + at} the learning rate is {rates.candidate[at]:.6g} after a "
                f"resume on {ranks} ranks, {rates.original[at]:.6g} without",
                where=Where(step=begin + at),
            )
        )
    if not _same_generator(original, resumed, begin) and _first(losses) == begin:
        found.append(
            RULES["SF733"].finding(
                evidence=f"at the first forward of step {begin} torch's generator is not in the state of the "
                f"uninterrupted run; loss {loss:.6g} against {losses.original[0]:.6g}",
                where=where,
            )
        )
    if found:
        return tuple(found)
    if _first(losses) == begin and _first(comparison.quantity("gradient norm")) == begin:
        inputs = _same_inputs(candidate, resumed, begin)
        code = "SF734" if inputs is False else "SF705"
        seen = {True: "on the same inputs", False: "on other inputs", None: "inputs not comparable"}[inputs]
        return (
            RULES[code].finding(
                evidence=f"the first loss after the resume on {ranks} ranks is {loss:.6g}, without it "
                f"{losses.original[0]:.6g}, {seen}",
                where=where,
            ),
        )
    first = comparison.first_step
    # The first update after the resume goes wrong on the right gradient and the right inputs.
    if first == begin + 1 and _same_inputs(candidate, resumed, first) is not False:
        return (
            RULES["SF704"].finding(
                evidence=f"step {begin} has the right loss and gradient; after its update step {first} is "
                f"off (loss by {losses.largest:.2e} at most)",
                where=Where(step=first),
            ),
        )
    return (_unexplained(resumed, comparison),)


# A candidate that did not run to its end


def name_failure(run: Recording) -> Finding | None:
    """A candidate that hung or failed, with the stacks or the error of the rank that failed first."""
    hung = [rank for rank in run.ranks if rank.ended == "hang"]
    failed = sorted(
        (rank for rank in run.ranks if rank.ended == "error"),
        key=lambda rank: rank.facts.get("failed_at") or float("inf"),
    )
    if failed:
        first = failed[0]
        return RULES["SF631"].finding(
            message="the candidate failed",
            evidence=f"after {len(first.steps)} steps: {first.error}\n{_tail(first.trace)}",
            where=Where(rank=first.rank, step=len(first.steps)),
        )
    if hung:
        stacks = "\n".join(f"rank {rank.rank}:\n{_tail(rank.stacks, lines=14)}" for rank in hung)
        return RULES["SF631"].finding(
            message="the candidate hangs",
            evidence=f"no sign of life after {min(len(r.steps) for r in hung)} steps; stacks:\n{stacks}",
            where=Where(step=min(len(r.steps) for r in hung)),
        )
    return None


def _tail(text: str, *, lines: int = 6) -> str:
    return "\n".join(text.rstrip().splitlines()[-lines:])


# Facts about live objects


def _facts(run: Recording, name: str) -> Any:
    """A fact of the first rank that has it."""
    return next((r.facts[name] for r in run.ranks if r.facts.get(name)), None)


def _stale_optimizer(candidate: Recording, comparison: Comparison) -> Finding | None:
    orphans = _facts(candidate, "orphans")
    if not orphans:
        return None
    apart = [weight for weight in comparison.weights if not weight.agrees]
    unmoved = f"; {len(apart)} of {len(comparison.weights)} weights end up elsewhere" if apart else ""
    return RULES["SF501"].finding(
        evidence=f"the optimizer holds {len(orphans)} tensors that no module has: {_few(orphans)}{unmoved}"
    )


def _forward_direct(candidate: Recording, _: Comparison) -> Finding | None:
    direct = _facts(candidate, "forward_called_directly")
    if not direct:
        return None
    return RULES["SF306"].finding(
        evidence=f"forward of {_few(direct)} ran without its FSDP2 hooks, so on sharded parameters"
    )


def _unsynced(candidate: Recording, _: Comparison) -> Finding | None:
    steps = _facts(candidate, "unsynced")
    if not steps:
        return None
    return RULES["SF506"].finding(
        evidence=f"before {len(steps)} of {candidate.num_steps} steps gradient sync was off in the last "
        f"backward ({_facts(candidate, 'unsynced_units') or 'root'})",
        where=Where(step=steps[0]),
    )


def _drifting(candidate: Recording, comparison: Comparison) -> Finding | None:
    unsharded = _facts(candidate, "unsharded") or []
    apart = [name for name in comparison.drifted if name in unsharded] or list(comparison.drifted)
    if not apart:
        return None
    return RULES["SF301"].finding(
        evidence=f"{len(apart)} parameters are in no unit and have other values on other ranks: {_few(apart)}"
    )


def _low_reduction(candidate: Recording, _: Comparison) -> Finding | None:
    low = [
        unit
        for unit in _facts(candidate, "fsdp_units") or []
        if str(unit["reduce_dtype"] or unit["param_dtype"]).removeprefix("torch.") in _LOW
    ]
    if not low:
        return None
    dtype = str(low[0]["reduce_dtype"] or low[0]["param_dtype"]).removeprefix("torch.")
    return RULES["SF401"].finding(
        evidence=f"{len(low)} units reduce in {dtype}: {_few([unit['path'] or '(root)' for unit in low])}"
    )


def _left_out(original: Recording, candidate: Recording) -> Finding | None:
    known = set(_facts(original, "not_in_optimizer") or [])
    left = [name for name in _facts(candidate, "not_in_optimizer") or [] if name not in known]
    if not left or _facts(candidate, "orphans"):
        return None
    return RULES["SF513"].finding(evidence=f"trainable, and no optimizer holds them: {_few(left)}")


def _evaluation_mode(original: Recording, candidate: Recording) -> Finding | None:
    theirs, ours = _facts(original, "modes"), _facts(candidate, "modes")
    if not theirs or not ours:
        return None
    apart = [i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a and not b]
    if not apart:
        return None
    return RULES["SF609"].finding(
        evidence=f"forwards of step {apart[0]} run in evaluation mode, the original's in training mode",
        where=Where(step=apart[0]),
    )


def _same_rows(original: Recording, candidate: Recording) -> Finding | None:
    """Every rank computes the same rows."""
    if len(candidate.ranks) < 2 or _tensor_axis(candidate):
        return None
    rows = [_rows(rank) for rank in candidate.ranks]
    if not rows[0] or any(row != rows[0] for row in rows):
        return None
    theirs = _rows(original.ranks[0])
    if rows[0] == theirs:
        return RULES["SF601"].finding(
            message="every rank computes the whole batch: the same training, and no faster on more ranks",
            evidence=f"in the first step all {len(rows)} ranks had the original's "
            f"{sum(rows[0].values())} rows",
        )
    finding = RULES["SF601"].finding(
        evidence=f"in the first step all {len(rows)} ranks had the same {sum(rows[0].values())} rows, "
        f"the original {sum(theirs.values())}",
    )
    return dataclasses.replace(finding, severity="error")


def _tensor_axis(candidate: Recording) -> bool:
    units = _facts(candidate, "fsdp_units") or []
    sizes = [size for unit in units[:1] for size in unit.get("mesh") or []]
    product = 1
    for size in sizes:
        product *= size
    return bool(sizes) and product < len(candidate.ranks)


def _rows(rank: RankRecord) -> Counter[str]:
    digests = (rank.facts.get("row_digests") or {}).get("0") or []
    return Counter(digest for forward in digests for digest in forward)


# What the numbers show


def _by_factor(original: Recording, candidate: Recording, comparison: Comparison) -> Finding | None:
    """A loss or gradient that is off by a factor which means something, from the first step on."""
    losses, norms = step_losses(original), step_norms(original)
    ours, our_norms = step_losses(candidate), step_norms(candidate)
    if not (losses and ours and losses[0] and norms[0]):
        return None
    loss, norm = ours[0] / losses[0], our_norms[0] / norms[0]
    world = max(rank.data_world for rank in candidate.ranks)
    backwards = (_facts(candidate, "backwards") or [1])[0]
    evidence = (
        f"in the first step the loss is {loss:.5g} times and the gradient norm {norm:.5g} times the "
        "original's"
    )
    where = Where(step=0)

    def near(ratio: float, factor: float) -> bool:
        return abs(ratio / factor - 1) < _FACTOR_TOLERANCE

    if backwards > 1 and near(loss, backwards) and near(norm, backwards):
        return RULES["SF508"].finding(evidence=f"{evidence}; {backwards} micro-batches a step", where=where)
    if world > 1 and near(loss, 1 / world) and near(norm, 1 / world):
        return RULES["SF511"].finding(evidence=f"{evidence}; {world} data ranks", where=where)
    if world > 1 and near(loss, 1) and near(norm, 1 / world):
        return RULES["SF510"].finding(evidence=f"{evidence}; {world} data ranks", where=where)
    theirs = _rows(original.ranks[0])
    together = sum((_rows(rank) for rank in candidate.ranks), Counter[str]())
    if theirs and together and together != theirs:
        more = sum(together.values()) / sum(theirs.values())
        if near(more, world) and world > 1:
            return RULES["SF605"].finding(
                evidence=f"the ranks' first step has {sum(together.values())} rows, the original's "
                f"{sum(theirs.values())}",
                where=where,
            )
        return RULES["SF630"].finding(
            message="the candidate trains on other data",
            evidence=f"in the first step {sum((together & theirs).values())} of the original's "
            f"{sum(theirs.values())} rows are among the ranks' {sum(together.values())}",
            where=where,
        )
    return None


def _unexplained(run: Recording, comparison: Comparison) -> Finding:
    seen = [_sentence(q) for q in comparison.quantities if not q.agrees]
    if apart := [weight for weight in comparison.weights if not weight.agrees]:
        seen.append(
            f"final {apart[0].name} by {apart[0].absolute:.2e} (limit {apart[0].tolerance:.1e}), "
            f"{len(apart)} of {len(comparison.weights)} weights in all"
        )
    for words, names in (("lacks", comparison.missing), ("has besides", comparison.unexpected)):
        if names:
            seen.append(f"the candidate {words} {_few(list(names))}")
    if comparison.num_steps == 0:
        seen.append("there is no step to compare")
    if comparison.first_tensor:
        seen.append(f"the first gradient to differ is that of {comparison.first_tensor}")
    rank = run.ranks[0] if run.ranks else None
    if rank is not None and rank.facts.get("draws") == "own":
        seen.append(f"random draws in the model could not be brought in line ({rank.facts.get('draws_why')})")
    return RULES["SF630"].finding(evidence="; ".join(seen), where=Where(step=comparison.first_step))


def _sentence(quantity: Quantity) -> str:
    index = (quantity.first_step or 0) - ((quantity.at_step or 0) - _worst(quantity))
    a, b = quantity.original[index], quantity.candidate[index]
    return (
        f"{quantity.name} from step {quantity.first_step} on ({a:.8g} and {b:.8g}), "
        f"at most {quantity.largest:.2e} at step {quantity.at_step} (limit {quantity.tolerance:.1e})"
    )


def _worst(quantity: Quantity) -> int:
    differences = [relative(a, b) for a, b in zip(quantity.original, quantity.candidate, strict=True)]
    return max(range(len(differences)), key=differences.__getitem__)


def _first(quantity: Quantity) -> int | None:
    return quantity.first_step


def _same_generator(original: Recording, resumed: Recording, begin: int) -> bool:
    theirs = original.ranks[0].facts.get("rng") or []
    ours = resumed.ranks[0].facts.get("rng") or []
    index = begin - original.ranks[0].first_step
    return not (ours and index < len(theirs)) or theirs[index] == ours[0]


def _same_inputs(candidate: Recording, resumed: Recording, step: int) -> bool | None:
    """Whether a step of the resumed run has the candidate's inputs. None at another world size."""
    if len(candidate.ranks) != len(resumed.ranks):
        return None
    return all(
        a.steps[step - a.first_step].inputs == b.steps[step - b.first_step].inputs
        for a, b in zip(candidate.ranks, resumed.ranks, strict=True)
    )


def _few(names: list[str]) -> str:
    shown = ", ".join(str(name) for name in names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
