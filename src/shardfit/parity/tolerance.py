"""How far two right runs may be apart, and why. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from shardfit.parity.recording import Recording

# Unit roundoff of the dtypes that a run may compute in.
EPSILON = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}

# Sums in another order differ by a few roundings; training carries them on from step to step.
# In fp32, right runs of 20 steps were 1e-7 to 8e-7 apart in losses and up to 4e-6 in gradient
# norms; the limits are some ten times that. A wrong factor, batch or state is at 1e-3 and more.
_LOSS_ROUNDINGS = 128
_GRADIENT_ROUNDINGS = 1024
_RATE = 1e-9
# In low precision the counts above would let a factor of two pass. A right run in bf16 is within
# a few roundings of a loss, which is a mean over many; a wrong factor is at 0.3 and more.
_LARGEST_LOSS = 0.02
_LARGEST_GRADIENT = 0.1
_LARGEST_WEIGHT = 0.03


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Limits for one comparison.

    Attributes:
        loss, gradient, rate: relative, of losses, gradient norms and learning rates.
        path: the sum of the learning rates of all steps, which bounds how far Adam moves an element.
        dtype: the least precise dtype that either run computes in.
        sentences: the rules, for people.
    """

    loss: float
    gradient: float
    rate: float
    path: float
    dtype: str

    def weight(self, largest: float) -> float:
        """Absolute limit for a parameter whose largest element is `largest`.

        Adam divides a gradient by its own size: an element whose gradient is rounding noise may move
        by the whole learning rate, in either direction. So 2 % of the path is allowed, and roundings
        of the value itself. (A wrong state or factor moves most elements by much of the path.)
        """
        return 0.02 * self.path + min(64 * EPSILON[self.dtype], _LARGEST_WEIGHT) * max(largest, 1e-3)

    @property
    def sentences(self) -> tuple[str, ...]:
        return (
            f"losses within {self.loss:.1e} and gradient norms within {self.gradient:.1e}, relatively, "
            f"for computation in {self.dtype}: sums in another order",
            f"final weights within {0.02 * self.path:.1e}, 2 % of the sum of all learning rates, and some "
            "roundings: Adam may move an element whose gradient is noise by the whole rate",
        )


def tolerance_for(original: Recording, candidate: Recording, *, rtol: float | None = None) -> Tolerance:
    """The limits for two runs, from the least precise dtype that either computes in.

    Args:
        rtol: for losses and gradient norms in place of the rule's.
    """
    dtype = max(
        (name for recording in (original, candidate) for name in computed_dtypes(recording)),
        key=EPSILON.__getitem__,
        default="float32",
    )
    epsilon = EPSILON[dtype]
    rates = [step.lr for rank in original.ranks[:1] for step in rank.steps]
    return Tolerance(
        loss=rtol if rtol is not None else min(_LOSS_ROUNDINGS * epsilon, _LARGEST_LOSS),
        gradient=rtol if rtol is not None else min(_GRADIENT_ROUNDINGS * epsilon, _LARGEST_GRADIENT),
        rate=_RATE,
        path=sum(max(step, default=0.0) for step in rates),
        dtype=dtype,
    )


def computed_dtypes(recording: Recording) -> set[str]:
    """Dtypes that a run's parameters are stored or computed in, as far as they are known here."""
    found = {part.dtype for rank in recording.ranks for part in rank.parts}
    for rank in recording.ranks:
        found |= {
            str(unit["param_dtype"]) for unit in rank.facts.get("fsdp_units") or [] if unit["param_dtype"]
        }
    return {name.removeprefix("torch.") for name in found} & EPSILON.keys()
