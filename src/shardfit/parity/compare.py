"""Two recordings, compared: losses, gradient norms, learning rates, final weights. The verdict is a value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardfit.parity.recording import Part, RankRecord, Recording, Step
from shardfit.parity.tolerance import Tolerance, tolerance_for

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One number a step, of both runs.

    Attributes:
        name: "loss", "gradient norm" or "learning rate".
        original, candidate: the values, in order of steps.
        largest: largest relative difference; inf where only one is finite.
        at_step: where it is, in steps of the whole run.
        tolerance: relative, see `shardfit.parity.tolerance`.
        first_step: the first step beyond it. None: there is none.
    """

    name: str
    original: tuple[float, ...]
    candidate: tuple[float, ...]
    largest: float
    at_step: int | None
    tolerance: float
    first_step: int | None

    @property
    def agrees(self) -> bool:
        return self.first_step is None


@dataclass(frozen=True, kw_only=True)
class WeightDifference:
    """The largest difference of one parameter after the last step.

    Attributes:
        absolute: largest absolute difference of an element.
        relative: norm of the difference over the norm of the original's.
        tolerance: absolute.
    """

    name: str
    absolute: float
    relative: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.absolute <= self.tolerance


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What two runs have in common, and the first thing that they don't.

    Attributes:
        first: the first step compared, from 0 in the whole run.
        num_steps: how many were compared.
        quantities: loss, gradient norm, learning rate.
        weights: by size of the difference, largest first; empty if they were not compared.
        first_step: the first step at which any quantity is beyond its tolerance.
        first_tensor: the parameter whose gradient differs first (and most, relatively, at that
            step), else the one whose final values do.
        drifted: parameters that every rank of the candidate should have alike, and doesn't.
        missing, unexpected: parameters that only the original, or only the candidate, has.
        tolerances: the rules that were applied, as sentences.
    """

    first: int
    num_steps: int
    quantities: tuple[Quantity, ...]
    weights: tuple[WeightDifference, ...]
    first_step: int | None
    first_tensor: str | None
    drifted: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    tolerances: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether nothing that was compared differs. A comparison of no steps agrees with nothing."""
        return (
            self.num_steps > 0
            and self.first_step is None
            and all(weight.agrees for weight in self.weights)
            and not (self.drifted or self.missing or self.unexpected)
        )

    def quantity(self, name: str) -> Quantity:
        return next(q for q in self.quantities if q.name == name)


def compare(
    original: Recording, candidate: Recording, *, rtol: float | None = None, weights: bool = True
) -> Comparison:
    """Compare a candidate with the original, step by step of the whole run.

    A resumed run (`RankRecord.first_step`) is compared with the same steps of the other.

    Args:
        rtol: relative tolerance of losses and gradient norms in place of the rule's.
        weights: compare the final weights too, if both runs ended after the same step.
    """
    first, last = _common_steps(original, candidate)
    tolerance = tolerance_for(original, candidate, rtol=rtol)
    curves: tuple[tuple[str, Callable[[Recording], list[float]], float], ...] = (
        ("loss", step_losses, tolerance.loss),
        ("gradient norm", step_norms, tolerance.gradient),
        ("learning rate", step_rates, tolerance.rate),
    )
    quantities = tuple(
        _quantity(
            name, _window(curve, original, first, last), _window(curve, candidate, first, last), limit, first
        )
        for name, curve, limit in curves
    )
    beyond = [q.first_step for q in quantities if q.first_step is not None]
    ours, theirs = _names(candidate), _names(original)
    found: tuple[WeightDifference, ...] = ()
    if weights and first < last and _end(original) == _end(candidate):
        found = _compare_weights(original, candidate, tolerance)
    tensor = _first_tensor(original, candidate, first, last, tolerance)
    if tensor is None and (apart := [w.name for w in found if not w.agrees]):
        tensor = apart[0]
    return Comparison(
        first=first,
        num_steps=max(0, last - first),
        quantities=quantities,
        weights=found,
        first_step=min(beyond, default=None),
        first_tensor=tensor,
        drifted=find_drift(candidate),
        missing=tuple(sorted(theirs - ours)) if ours else (),
        unexpected=tuple(sorted(ours - theirs)) if ours else (),
        tolerances=tolerance.sentences,
    )


# Curves


def step_losses(recording: Recording) -> list[float]:
    """Of each step, the sum over its micro-batches of the mean over ranks: what the step descends."""
    return [sum(sum(step.losses) for step in steps) / len(steps) for steps in _steps(recording)]


def step_norms(recording: Recording) -> list[float]:
    """Of each step, the whole gradient's norm before clipping."""
    return [math.sqrt(sum(norm * norm for norm in norms.values())) for norms in tensor_norms(recording)]


def step_rates(recording: Recording) -> list[float]:
    """Of each step, the learning rate of the first parameter group."""
    return [steps[0].lr[0] if steps[0].lr else 0.0 for steps in _steps(recording)]


def tensor_norms(recording: Recording) -> list[dict[str, float]]:
    """Of each step, the norm of each parameter's gradient: parts joined, copies counted once."""
    holders = _holders(recording)
    norms = []
    for steps in _steps(recording):
        names = dict.fromkeys(name for step in steps for name in step.squares)
        norms.append(
            {
                name: math.sqrt(
                    max(0.0, sum(steps[rank].squares.get(name, 0.0) for rank in holders.get(name, range(1))))
                )
                for name in names
            }
        )
    return norms


def _steps(recording: Recording) -> Iterator[list[Step]]:
    for index in range(recording.num_steps):
        yield [rank.steps[index] for rank in recording.ranks]


def _holders(recording: Recording) -> dict[str, list[int]]:
    """By name, the ranks whose parts make up the whole: one for each different part."""
    holders: dict[str, dict[tuple[int, ...], int]] = {}
    for index, rank in enumerate(recording.ranks):
        for part in rank.parts:
            if math.prod(part.extent):
                holders.setdefault(part.name, {}).setdefault((*part.offset, *part.extent), index)
    return {name: list(parts.values()) for name, parts in holders.items()}


def _begin(recording: Recording) -> int:
    return recording.ranks[0].first_step if recording.ranks else 0


def _end(recording: Recording) -> int:
    return _begin(recording) + recording.num_steps


def _common_steps(original: Recording, candidate: Recording) -> tuple[int, int]:
    first = max(_begin(original), _begin(candidate))
    return first, max(first, min(_end(original), _end(candidate)))


def _window(
    curve: Callable[[Recording], list[float]], recording: Recording, first: int, last: int
) -> list[float]:
    begin = _begin(recording)
    return curve(recording)[first - begin : last - begin]


def _quantity(name: str, original: list[float], candidate: list[float], limit: float, first: int) -> Quantity:
    differences = [relative(a, b) for a, b in zip(original, candidate, strict=True)]
    worst = max(range(len(differences)), key=differences.__getitem__, default=None)
    return Quantity(
        name=name,
        original=tuple(original),
        candidate=tuple(candidate),
        largest=differences[worst] if worst is not None else 0.0,
        at_step=None if worst is None else first + worst,
        tolerance=limit,
        first_step=next((first + i for i, d in enumerate(differences) if d > limit), None),
    )


def relative(a: float, b: float) -> float:
    """|a - b| over the larger of the two; 0 for equal ones (two NaNs too), inf if one isn't finite."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))


def _first_tensor(
    original: Recording, candidate: Recording, first: int, last: int, tolerance: Tolerance
) -> str | None:
    """The parameter whose gradient differs most at the first step at which any differs by more than noise."""
    theirs, ours = tensor_norms(original), tensor_norms(candidate)
    for step in range(first, last):
        a, b = theirs[step - _begin(original)], ours[step - _begin(candidate)]
        whole = math.sqrt(sum(norm * norm for norm in a.values())) or 1.0
        apart = {
            # Against the whole gradient: a bias whose gradient is rounding noise is no evidence.
            name: abs(a.get(name, 0.0) - b.get(name, 0.0)) / whole
            for name in (a.keys() | b.keys())
            if abs(a.get(name, 0.0) - b.get(name, 0.0)) > tolerance.gradient * whole
        }
        if apart:
            return max(sorted(apart), key=lambda name: apart[name] * whole / max(a.get(name, 0.0), 1e-30))
    return None


# Weights


def _names(recording: Recording) -> set[str]:
    return {part.name for rank in recording.ranks for part in rank.parts if part.trainable and part.in_model}


def _compare_weights(
    original: Recording, candidate: Recording, tolerance: Tolerance
) -> tuple[WeightDifference, ...]:
    theirs, ours = _Weights(original), _Weights(candidate)
    found = []
    for name in theirs.names:
        if name not in ours.names:
            continue
        a, b = theirs.whole(name), ours.whole(name)
        if a is None or b is None:
            continue
        if a.shape != b.shape:
            found.append(WeightDifference(name=name, absolute=math.inf, relative=math.inf, tolerance=0.0))
            continue
        difference = (a - b).abs()
        absolute = float(difference.max()) if difference.numel() else 0.0
        norm = float(a.norm())
        found.append(
            WeightDifference(
                name=name,
                absolute=math.inf if math.isnan(absolute) else absolute,
                relative=float(difference.norm()) / norm if norm else absolute,
                tolerance=tolerance.weight(float(a.abs().max()) if a.numel() else 0.0),
            )
        )
    return tuple(sorted(found, key=lambda w: (w.agrees, -w.absolute / (w.tolerance or 1.0))))


class _Weights:
    """The final weights of a run, one whole parameter at a time, in float64."""

    def __init__(self, recording: Recording) -> None:
        import torch

        self._parts: dict[str, dict[tuple[int, ...], tuple[int, Part]]] = {}
        self._files: dict[int, dict[str, Tensor]] = {}
        for index, rank in enumerate(recording.ranks):
            file = Path(recording.folder) / f"weights-{rank.rank}.pt"
            if file.exists():
                self._files[index] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
            for part in rank.parts:
                if part.in_model and math.prod(part.extent) > 0 and part.name in self._files.get(index, {}):
                    place = (*part.offset, *part.extent)
                    self._parts.setdefault(part.name, {}).setdefault(place, (index, part))

    @property
    def names(self) -> list[str]:
        return list(self._parts)

    def whole(self, name: str) -> Tensor | None:
        """A parameter joined from its parts. None where they don't cover it."""
        import torch

        parts = list(self._parts[name].values())
        shape: tuple[int, ...] = parts[0][1].shape
        whole = torch.full(shape, math.nan, dtype=torch.float64)
        covered = 0
        for index, part in parts:
            region = tuple(slice(o, o + e) for o, e in zip(part.offset, part.extent, strict=True))
            whole[region] = self._files[index][name].double()
            covered += math.prod(part.extent)
        return whole if covered >= whole.numel() else None


def find_drift(recording: Recording) -> tuple[str, ...]:
    """Parameters that every rank holds whole, with different values after some step."""
    drifted: dict[str, None] = {}
    ranks: tuple[RankRecord, ...] = recording.ranks
    for index in range(recording.num_steps):
        seen: dict[str, str] = {}
        for rank in ranks:
            for name, digest in rank.steps[index].weights.items():
                if seen.setdefault(name, digest) != digest:
                    drifted[name] = None
    return tuple(drifted)
