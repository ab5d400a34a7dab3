"""What a recording can't be trusted for: said in the report, so that "the same" means something. No torch."""

from __future__ import annotations

from typing import Any

from shardfit.findings import Finding, Where
from shardfit.parity.recording import Recording
from shardfit.rules import RULES


def name_recorder_failure(label: str, recording: Recording) -> Finding | None:
    """A mistake of the recorder's own: then nothing that it wrote is a proof."""
    for rank in recording.ranks:
        if error := rank.facts.get("recorder_error"):
            return RULES["SF631"].finding(
                message=f"the recorder failed while it observed the {label}: nothing is proved",
                evidence=str(error),
                where=Where(rank=rank.rank),
            )
    return None


def doubts_of(label: str, recording: Recording) -> list[str]:
    """Sentences on what was compared less closely than usual."""
    sentences = []
    if _first(recording, "draws") == "own":
        sentences.append(
            f"random draws inside the {label}'s model could not be brought in line with the original's "
            f"({_first(recording, 'draws_why') or 'the reason is unknown'}): dropout then differs"
        )
    if broken := _first(recording, "exchange_broken"):
        sentences.append(f"the recorders of the {label}'s ranks lost each other: {broken}")
    if outside := _first(recording, "saved_outside"):
        files = ", ".join(str(file) for file in outside[:3])
        sentences.append(
            f"the {label} saves outside its own folder, so to the real place and not to a copy: {files}"
        )
    return sentences


def _first(recording: Recording, name: str) -> Any:
    return next((rank.facts[name] for rank in recording.ranks if rank.facts.get(name)), None)
